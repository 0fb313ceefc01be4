//! Sockets: where the server listens, and one task for each connection.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use hyper::body::{Bytes, Frame, Incoming, SizeHint};
use hyper::http::{Extensions, Response};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::watch;
use tokio::time::{Sleep, sleep};

use super::App;
use super::body::Body;
use super::router::{self, Peer};
use super::sockets::{Activity, Answering, Socket};
use super::{limits, proxy};
use crate::{Error, Result};

/// The place at which a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp {
        host: String,
        port: u16,
    },
    /// A socket of this machine, by its path.
    Unix(PathBuf),
}

impl Address {
    /// `host` is a name, an address, or a path that ends in `.sock`.
    pub fn new(host: &str, port: u16) -> Address {
        match host.ends_with(".sock") {
            true => Address::Unix(host.into()),
            false => Address::Tcp { host: host.trim_matches(['[', ']']).to_owned(), port },
        }
    }

    /// Whether the name itself says that only this machine can connect.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Unix(_) => true,
            Address::Tcp { host, .. } => {
                host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
        }
    }
}

/// An open socket that takes connections.
pub enum Listener {
    Tcp(TcpListener, SocketAddr),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Opens it; inside of a runtime.
    pub fn bind(address: &Address) -> Result<Listener> {
        match address {
            Address::Tcp { host, port } => {
                let failed = |e| Error::io(format!("{host}:{port}"), e);
                let listener =
                    std::net::TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                let own = listener.local_addr().map_err(failed)?;
                Ok(Listener::Tcp(TcpListener::from_std(listener).map_err(failed)?, own))
            }
            Address::Unix(path) => {
                remove_stale(path)?;
                // No other user may connect, not even before a change of its mode.
                let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
                let listener = UnixListener::bind(path);
                rustix::process::umask(mask);
                Ok(Listener::Unix(listener.map_err(|e| Error::io(path, e))?, path.clone()))
            }
        }
    }

    /// Whether only programs of this machine can connect.
    pub fn is_local(&self) -> bool {
        match self {
            Listener::Tcp(_, own) => own.ip().is_loopback(),
            Listener::Unix(..) => true,
        }
    }

    /// The address for clients.
    pub fn url(&self) -> String {
        match self {
            Listener::Tcp(_, own) if own.ip().is_unspecified() => {
                format!("http://127.0.0.1:{}", own.port())
            }
            Listener::Tcp(_, own) => format!("http://{own}"),
            Listener::Unix(_, path) => format!("unix:{}", path.display()),
        }
    }

    /// Takes connections until the task is aborted.
    pub async fn run(self, app: Arc<App>, stop: watch::Receiver<bool>) {
        let mut failures = Failures::default();
        match self {
            Listener::Tcp(listener, _) => loop {
                match listener.accept().await {
                    Ok((stream, address)) => accept_tcp(stream, address.ip(), &app, &stop),
                    Err(e) => failures.wait(&e).await,
                }
            },
            Listener::Unix(listener, _) => loop {
                match listener.accept().await {
                    Ok((stream, _)) => accept(stream, Peer::default(), &app, &stop),
                    Err(e) => failures.wait(&e).await,
                }
            },
        }
    }
}

/// A socket that a server has left behind refuses connections; one that answers is in use.
fn remove_stale(path: &Path) -> Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    if !is_socket {
        return Ok(());
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(|e| Error::io(path, e))
        }
        _ => Ok(()),
    }
}

/// Failures to accept a connection. They come without end while too many files are open.
#[derive(Default)]
struct Failures {
    /// When the log last told of some, and how many there were since.
    told: Option<Instant>,
    n_untold: usize,
}

/// The shortest time between two messages about connections that cannot be accepted.
const QUIET: Duration = Duration::from_secs(10);

impl Failures {
    /// Waits: a while later some files are closed.
    async fn wait(&mut self, error: &io::Error) {
        self.n_untold += 1;
        if self.is_to_be_told(Instant::now()) {
            log::warn!("cannot accept a connection ({} tries): {error}", self.n_untold);
            self.n_untold = 0;
        }
        sleep(Duration::from_millis(50)).await;
    }

    fn is_to_be_told(&mut self, now: Instant) -> bool {
        let is_due = self.told.is_none_or(|told| now.saturating_duration_since(told) >= QUIET);
        if is_due {
            self.told = Some(now);
        }
        is_due
    }
}

fn accept_tcp(stream: TcpStream, address: IpAddr, app: &Arc<App>, stop: &watch::Receiver<bool>) {
    let local = stream.local_addr().ok().map(|local| local.ip());
    let _ = stream.set_nodelay(true);
    limit_unsent(&stream);
    accept(stream, Peer { address: Some(address), local }, app, stop);
}

/// Bytes that the system holds for a client which does not read, besides those that are under way.
#[cfg(target_os = "linux")]
static MAX_UNSENT: libc::c_int = 128 << 10;

/// Lets writes wait for readers: the system would hold some MiB for each of them.
#[cfg(target_os = "linux")]
fn limit_unsent(stream: &TcpStream) {
    use std::os::fd::AsRawFd;
    let length = size_of_val(&MAX_UNSENT) as libc::socklen_t;
    let value = (&raw const MAX_UNSENT).cast();
    // SAFETY: the descriptor is open as long as the stream is borrowed, and the pointer and the
    // length are those of a constant. A system that does not have the option says so.
    unsafe {
        let (fd, level) = (stream.as_raw_fd(), libc::IPPROTO_TCP);
        libc::setsockopt(fd, level, libc::TCP_NOTSENT_LOWAT, value, length);
    }
}

#[cfg(not(target_os = "linux"))]
fn limit_unsent(_: &TcpStream) {}

/// Serves a connection if there is a place for it; if there is none, it is told so, or closed where
/// too many are being told already.
fn accept<I>(stream: I, peer: Peer, app: &Arc<App>, stop: &watch::Receiver<bool>)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let is_trusted = proxy::is_trusted(peer.address, &app.options.connections.proxies);
    let address = peer.address.map(|ip| ip.to_canonical()).filter(|_| !is_trusted);
    let socket = app.sockets.enter(address);
    if socket.as_ref().is_none_or(|socket| socket.is_refused) {
        app.metrics.add_rejected("sockets");
    }
    let Some(socket) = socket else { return };
    tokio::spawn(serve(stream, peer, Arc::new(socket), app.clone(), stop.clone()));
}

/// The body of an answer, and what lasts as long as the answer does.
struct Tracked {
    body: Body,
    _answer: Answering,
    _extensions: Extensions,
}

impl Tracked {
    fn new(response: Response<Body>, answer: Answering) -> Response<Tracked> {
        let (mut parts, body) = response.into_parts();
        let extensions = std::mem::take(&mut parts.extensions);
        let tracked = Tracked { body, _answer: answer, _extensions: extensions };
        Response::from_parts(parts, tracked)
    }
}

impl hyper::body::Body for Tracked {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Serves a connection's requests until it ends, or until the one that is under way when the
/// server stops, or another connection gets the place.
async fn serve<I>(
    stream: I,
    peer: Peer,
    socket: Arc<Socket>,
    app: Arc<App>,
    mut stop: watch::Receiver<bool>,
) where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let activity = socket.activity.clone();
    let stream = TokioIo::new(Timed::new(stream, activity.clone()));
    let is_refused = socket.is_refused;
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (app, socket) = (app.clone(), socket.clone());
        async move {
            let answering = socket.activity.answer();
            let response = router::answer(app, peer, &socket, request).await;
            Ok::<_, Infallible>(Tracked::new(response, answering))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(if is_refused { limits::REFUSED_TIME } else { limits::HEADER_TIME })
        .keep_alive(!is_refused)
        .max_headers(limits::MAX_HEADERS)
        .max_header_size(limits::MAX_HEADER_BYTES)
        .max_buf_size(2 * limits::MAX_HEADER_BYTES)
        .serve_connection(stream, service);
    let mut connection = pin!(connection);
    let mut stopped = pin!(async move { stop.wait_for(|stop| *stop).await.is_ok() });
    let mut evicted = pin!(activity.evicted());
    let (mut is_told, mut is_evicted) = (false, false);
    let end = std::future::poll_fn(|cx| {
        let mut is_over = !is_told && stopped.as_mut().poll(cx).is_ready();
        if !is_evicted && let Poll::Ready(is_idle) = evicted.as_mut().poll(cx) {
            if is_idle {
                return Poll::Ready(Ok(()));
            }
            (is_evicted, is_over) = (true, true);
        }
        if is_over && !is_told {
            is_told = true;
            connection.as_mut().graceful_shutdown();
        }
        connection.as_mut().poll(cx)
    });
    if let Err(why) = end.await {
        log::debug!("a connection has ended: {why}");
    }
}

/// A stream whose client has some time to take what is written.
struct Timed<I> {
    stream: I,
    /// When a write that waits is given up.
    deadline: Option<Pin<Box<Sleep>>>,
    activity: Arc<Activity>,
}

impl<I> Timed<I> {
    fn new(stream: I, activity: Arc<Activity>) -> Timed<I> {
        Timed { stream, deadline: None, activity }
    }

    /// The result of a write, or an error if it waits for too long.
    fn bounded<T>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.activity.wrote();
            self.deadline = None;
            return result;
        }
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep(limits::WRITE_TIME)));
        ready!(deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Timed<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Timed<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.bounded(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.bounded(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(cx);
        self.bounded(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_now_and_then() {
        let (mut failures, start) = (Failures::default(), Instant::now());
        let told =
            (0..1200).filter(|i| failures.is_to_be_told(start + Duration::from_millis(50 * i)));
        assert_eq!(told.count(), 6);
    }
}
