//! Sockets: where the server listens, and one task for each connection.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{Sleep, sleep};

use super::App;
use super::limits;
use super::router::{self, Peer};
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
        match self {
            Listener::Tcp(listener, _) => loop {
                let (stream, address) = match listener.accept().await {
                    Ok(accepted) => accepted,
                    Err(e) => {
                        refused(&e).await;
                        continue;
                    }
                };
                accept_tcp(stream, address.ip(), &app, &stop);
            },
            Listener::Unix(listener, _) => loop {
                match listener.accept().await {
                    Ok((stream, _)) => accept_unix(stream, &app, &stop),
                    Err(e) => refused(&e).await,
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

/// Accepting fails when there are too many open files: a while later some are closed.
async fn refused(error: &io::Error) {
    log::warn!("cannot accept a connection: {error}");
    sleep(Duration::from_millis(50)).await;
}

fn accept_tcp(stream: TcpStream, address: IpAddr, app: &Arc<App>, stop: &watch::Receiver<bool>) {
    let Some(socket) = app.sockets.enter(Some(address)) else {
        app.metrics.add_rejected("sockets");
        let full = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n\
                     connection: close\r\n\r\n";
        // A new connection has room for this; if not, it is closed all the same.
        let _ = stream.try_write(full);
        return;
    };
    let local = stream.local_addr().ok().map(|local| local.ip());
    let _ = stream.set_nodelay(true);
    let peer = Peer { address: Some(address), local };
    let (app, stop) = (app.clone(), stop.clone());
    tokio::spawn(async move {
        serve(stream, peer, app, stop).await;
        drop(socket);
    });
}

fn accept_unix(stream: UnixStream, app: &Arc<App>, stop: &watch::Receiver<bool>) {
    let Some(socket) = app.sockets.enter(None) else { return };
    let (app, stop) = (app.clone(), stop.clone());
    tokio::spawn(async move {
        serve(stream, Peer::default(), app, stop).await;
        drop(socket);
    });
}

/// Serves a connection's requests until it ends, or until the one that is under way when the
/// server stops.
async fn serve<I>(stream: I, peer: Peer, app: Arc<App>, mut stop: watch::Receiver<bool>)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let app = app.clone();
        async move { Ok::<_, std::convert::Infallible>(router::answer(app, peer, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits::HEADER_TIME)
        .max_headers(limits::MAX_HEADERS)
        .max_header_size(limits::MAX_HEADER_BYTES)
        .max_buf_size(2 * limits::MAX_HEADER_BYTES)
        .serve_connection(TokioIo::new(Timed::new(stream)), service);
    let mut connection = pin!(connection);
    let mut stopped = pin!(async move { stop.wait_for(|stop| *stop).await.is_ok() });
    let mut is_told = false;
    let end = std::future::poll_fn(|cx| {
        if !is_told && stopped.as_mut().poll(cx).is_ready() {
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
}

impl<I> Timed<I> {
    fn new(stream: I) -> Timed<I> {
        Timed { stream, deadline: None }
    }

    /// The result of a write, or an error if it waits for too long.
    fn bounded<T>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
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
