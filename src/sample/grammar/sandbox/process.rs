//! A process that tries grammars out before this one compiles them.
//!
//! llguidance counts steps, but one step can double an expression, and a thread cannot be ended
//! from outside with what it holds. So the program runs itself a second time, with the vocabulary;
//! for each grammar that process forks, and the fork compiles it within bounds of memory and of
//! processor time, without files and without a network, and says whether that worked. What it took
//! is gone with it. Compiling takes the same steps each time, so this process then does it safely.
//!
//! A first fork has a tenth of a second, so that grammars of usual size do not wait for others; a
//! grammar that is not ready then gets the whole time, behind others of its kind.

use super::super::compile::{self, BOUNDS, Compiled};
use super::super::{Grammar, factory, vocabulary};
use crate::meter;
use crate::{Error, Result};
use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, TokTrie};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The name under which the program runs itself.
const NAME: &str = "moeba-grammars";

/// The program that is run; without one grammars are compiled without having been tried out.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Processor time of a first attempt, and of the second. Code that is not optimised is many times
/// slower.
const QUICK: Duration = Duration::from_millis(if cfg!(debug_assertions) { 3000 } else { 100 });
const WHOLE: Duration = Duration::from_secs(if cfg!(debug_assertions) { 30 } else { 2 });

/// Attempts at a time, and those that wait for a turn.
const N_QUICK: usize = 2;
const N_WHOLE: usize = 1;
const N_WAITING: usize = 64;

/// How long a grammar waits for its turn, and an attempt for processor time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Answers wait for those who compute them: tokens first.
const NICENESS: i32 = 5;

/// The answers of a fork: a byte, and the reason behind a refusal.
const FITS: u8 = b'f';
const REFUSED: u8 = b'r';
const TOO_LARGE: u8 = b'm';
const TOO_LONG: u8 = b't';

/// Makes the program try grammars out, or does so for the process that has started it as its
/// sandbox; then it does not return. To be called first in `main`, before there are threads.
pub fn serve_if_asked() {
    if std::env::args_os().next().is_some_and(|name| name == NAME) {
        serve();
    }
    // This very file, also when a newer one has its name.
    use_program("/proc/self/exe".into());
}

/// Makes `program`, whose `main` calls [`serve_if_asked`], try grammars out.
pub fn use_program(program: PathBuf) {
    // The first one stays.
    let _ = PROGRAM.set(program);
}

/// Tries out grammars for one vocabulary.
pub struct Sandbox {
    /// Takes the socket of an attempt.
    control: Mutex<Option<UnixStream>>,
    quick: Lane,
    whole: Lane,
}

/// Attempts with so much processor time.
struct Lane {
    time: Duration,
    turns: Mutex<Turns>,
    is_free: Condvar,
}

struct Turns {
    n_free: usize,
    n_waiting: usize,
}

struct Turn<'l>(&'l Lane);

enum Outcome {
    Fits,
    Refused(String),
    TooLarge,
    TooLong,
    /// The process ended without a word.
    Died,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self::new()
    }
}

impl Sandbox {
    pub fn new() -> Sandbox {
        let (quick, whole) = (Lane::new(QUICK, N_QUICK), Lane::new(WHOLE, N_WHOLE));
        Sandbox { control: Mutex::default(), quick, whole }
    }

    /// Fails for a grammar that does not compile within bounds; [`Error::Busy`] where too many
    /// others are being tried out. False where there is no program to do it.
    pub fn try_out(&self, trie: &TokTrie, grammar: &Grammar) -> Result<bool> {
        if PROGRAM.get().is_none() {
            return Ok(false);
        }
        let what = format!("compiling the {}", grammar.kind());
        for lane in [&self.quick, &self.whole] {
            let _turn = lane.turn()?;
            return Err(Error::Invalid(match self.attempt(trie, lane, grammar)? {
                Outcome::Fits => return Ok(true),
                Outcome::Refused(why) => why,
                Outcome::TooLong => continue,
                Outcome::TooLarge => {
                    format!("{what} took more than {} MiB of memory", BOUNDS.bytes >> 20)
                }
                Outcome::Died => format!("{what} made its engine fail"),
            }));
        }
        Err(Error::Invalid(format!("{what} took more than {} seconds", WHOLE.as_secs())))
    }

    fn attempt(&self, trie: &TokTrie, lane: &Lane, grammar: &Grammar) -> Result<Outcome> {
        let failed = |e: io::Error| Error::io(NAME, e);
        let (mut ours, theirs) = UnixStream::pair().map_err(failed)?;
        self.hand_over(trie, &theirs).map_err(failed)?;
        drop(theirs);
        let (tag, text) = grammar.source();
        let header = [lane.time.as_millis() as u32, text.len() as u32];
        let mut answer = Vec::new();
        let io = (|| {
            ours.set_read_timeout(Some(PATIENCE))?;
            ours.set_write_timeout(Some(PATIENCE))?;
            ours.write_all(&[tag])?;
            header.iter().try_for_each(|n| ours.write_all(&n.to_le_bytes()))?;
            ours.write_all(text.as_bytes())?;
            ours.read_to_end(&mut answer)
        })();
        match io {
            Err(e) if [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut].contains(&e.kind()) => {
                return Err(busy("the machine has no time to compile a grammar"));
            }
            Err(e) if answer.is_empty() => log::debug!("{NAME}: {e}"),
            _ => {}
        }
        Ok(match answer.first() {
            Some(&FITS) => Outcome::Fits,
            Some(&REFUSED) => Outcome::Refused(String::from_utf8_lossy(&answer[1..]).into_owned()),
            Some(&TOO_LARGE) => Outcome::TooLarge,
            Some(&TOO_LONG) => Outcome::TooLong,
            _ => Outcome::Died,
        })
    }

    /// Gives the socket to the other process, which is started where there is none, or none any
    /// more.
    fn hand_over(&self, trie: &TokTrie, theirs: &UnixStream) -> io::Result<()> {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = &*control
            && send(stream, theirs).is_ok()
        {
            return Ok(());
        }
        let stream = start(trie)?;
        send(&stream, theirs)?;
        *control = Some(stream);
        Ok(())
    }
}

impl Lane {
    fn new(time: Duration, n: usize) -> Lane {
        let turns = Mutex::new(Turns { n_free: n, n_waiting: 0 });
        Lane { time, turns, is_free: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turn(&self) -> Result<Turn<'_>> {
        let mut turns = self.lock();
        if turns.n_waiting >= N_WAITING {
            return Err(busy(&format!("{} grammars wait to be compiled", turns.n_waiting)));
        }
        turns.n_waiting += 1;
        let wait = self.is_free.wait_timeout_while(turns, PATIENCE, |turns| turns.n_free == 0);
        let (mut turns, waited) = wait.unwrap_or_else(PoisonError::into_inner);
        turns.n_waiting -= 1;
        if waited.timed_out() {
            return Err(busy("too many grammars are being compiled"));
        }
        turns.n_free -= 1;
        Ok(Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().n_free += 1;
        self.0.is_free.notify_one();
    }
}

fn busy(why: &str) -> Error {
    Error::Busy(format!("{why}: try again"))
}

/// Starts the program as a sandbox and tells it the vocabulary. It ends when its socket is closed.
fn start(trie: &TokTrie) -> io::Result<UnixStream> {
    let program = PROGRAM.get().ok_or(io::ErrorKind::NotFound)?;
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(program);
    // A group of its own: Ctrl-C on a terminal ends an answer, not this.
    command.arg0(NAME).env_clear().process_group(0);
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    // Whoever ends is waited for.
    std::thread::spawn(move || child.wait());
    let ends = trie.eos_tokens();
    let words = (0..trie.vocab_size() as u32).map(|id| trie.token(id));
    let mut all = Vec::new();
    for n in [trie.vocab_size(), ends.len()] {
        all.extend((n as u32).to_le_bytes());
    }
    ends.iter().for_each(|id| all.extend(id.to_le_bytes()));
    for word in words {
        all.extend((word.len() as u32).to_le_bytes());
        all.extend(word);
    }
    ours.write_all(&all)?;
    Ok(ours)
}

fn send(control: &UnixStream, socket: &UnixStream) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut buffer = SendAncillaryBuffer::new(&mut space);
    let sockets = [socket.as_fd()];
    if !buffer.push(SendAncillaryMessage::ScmRights(&sockets)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    sendmsg(control, &[IoSlice::new(&[0])], &mut buffer, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The socket of the next attempt; `None` when there will be none.
fn receive(control: &UnixStream) -> Option<UnixStream> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut buffer = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(control, &mut parts, &mut buffer, RecvFlags::CMSG_CLOEXEC)
    });
    if received.ok()?.bytes == 0 {
        return None;
    }
    buffer.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next().map(UnixStream::from),
        _ => None,
    })
}

fn read_u32(from: &mut UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn read_bytes(from: &mut UnixStream, n: u32) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(n.into()).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Forks for each socket that comes. The process has this one thread.
fn serve() -> ! {
    // SAFETY: descriptor 0 is the socket that `start` put there, and this is its only owner.
    let mut control = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    let Ok(factory) = read_factory(&mut control) else { std::process::exit(1) };
    // SAFETY: no handler is installed; forks that end are forgotten by the kernel.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    while let Some(socket) = receive(&control) {
        // SAFETY: there is no other thread whose locks the fork could find taken.
        if unsafe { libc::fork() } == 0 {
            drop(control);
            serve_one(&factory, socket);
        }
    }
    std::process::exit(0)
}

fn read_factory(control: &mut UnixStream) -> Result<Arc<ParserFactory>> {
    let failed = |e| Error::io(NAME, e);
    let mut number = || read_u32(control).map_err(failed);
    let (n_words, n_ends) = (number()?, number()?);
    let ends = (0..n_ends).map(|_| number()).collect::<Result<Vec<u32>>>()?;
    let mut word = || read_u32(control).and_then(|n| read_bytes(control, n)).map_err(failed);
    let words = (0..n_words).map(|_| word()).collect::<Result<Vec<_>>>()?;
    let trie = vocabulary::tree(&words, &ends);
    Ok(Arc::new(factory(&(Arc::new(ApproximateTokEnv::new(trie)) as _))?))
}

/// The socket of the attempt that this process is.
static SOCKET: AtomicI32 = AtomicI32::new(-1);

/// Ends the process with this answer. Called in signal handlers and in the allocator.
fn end_with(answer: u8) -> ! {
    let socket = SOCKET.load(Ordering::Relaxed);
    // SAFETY: both calls may stand in a signal handler; `answer` is one byte that lives.
    unsafe {
        libc::write(socket, (&raw const answer).cast(), 1);
        libc::_exit(0)
    }
}

extern "C" fn on_time(_signal: libc::c_int) {
    end_with(TOO_LONG)
}

/// Reads a grammar, compiles it and answers, in a process of its own.
fn serve_one(factory: &Arc<ParserFactory>, mut socket: UnixStream) -> ! {
    SOCKET.store(socket.as_raw_fd(), Ordering::Relaxed);
    let answer = (|| {
        let failed = |e| Error::io(NAME, e);
        let mut tag = [0];
        socket.read_exact(&mut tag).map_err(failed)?;
        let time = Duration::from_millis(read_u32(&mut socket).map_err(failed)?.into());
        let n_bytes = read_u32(&mut socket).map_err(failed)?;
        let text = read_bytes(&mut socket, n_bytes).map_err(failed)?;
        let grammar = Grammar::of_source(tag[0], &String::from_utf8_lossy(&text))?;
        confine(time).map_err(failed)?;
        meter::on_excess(|| end_with(TOO_LARGE));
        let factory = factory.clone();
        meter::run(compile::WHAT, BOUNDS, move || Compiled::new(&factory, &grammar).map(drop))
    })();
    let answer = match answer {
        Ok(()) => vec![FITS],
        Err(e) => [&[REFUSED], e.to_string().as_bytes()].concat(),
    };
    // If this fails, the caller does not wait any more.
    let _ = socket.write_all(&answer);
    // SAFETY: nothing of this process is to be written or freed.
    unsafe { libc::_exit(0) }
}

/// Takes from this process what compiling does not need: files, sockets, memory and time.
fn confine(time: Duration) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = |resource, most: u64| {
        let maximum = getrlimit(resource).maximum.map_or(most, |maximum| maximum.min(most));
        setrlimit(resource, Rlimit { current: Some(maximum), maximum: Some(maximum) })
    };
    // Of addresses: what is there already, the bounds, and room for arenas of the allocator.
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = pages.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(1u64 << 18);
    let there = pages * rustix::param::page_size() as u64;
    let bounds = BOUNDS.bytes as u64 + BOUNDS.stack_bytes as u64;
    limit(Resource::As, there + bounds + (256 << 20))?;
    limit(Resource::Nofile, 0)?;
    limit(Resource::Fsize, 0)?;
    limit(Resource::Core, 0)?;
    // SAFETY: the handler does nothing but write and end the process.
    unsafe {
        let handler: extern "C" fn(libc::c_int) = on_time;
        libc::signal(libc::SIGPROF, handler as libc::sighandler_t);
        let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
        let tv_usec = time.subsec_micros().into();
        let value = libc::timeval { tv_sec: time.as_secs() as libc::time_t, tv_usec };
        let timer = libc::itimerval { it_interval: none, it_value: value };
        if libc::setitimer(libc::ITIMER_PROF, &timer, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // Should the handler not run, the kernel ends the process.
    limit(Resource::Cpu, time.as_secs() + 1)?;
    lower_priority();
    // SAFETY: all of these take numbers alone.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        // Who waits for the answer closes the socket when it is not needed any more; the signal
        // that tells of it ends the process.
        let socket = SOCKET.load(Ordering::Relaxed);
        libc::fcntl(socket, libc::F_SETOWN, libc::getpid());
        libc::fcntl(socket, libc::F_SETFL, libc::O_ASYNC);
    }
    Ok(())
}

/// Lets this thread wait for those that compute tokens.
pub fn lower_priority() {
    // A process that may not is served as others are.
    let _ = rustix::process::setpriority_process(None, NICENESS);
}
