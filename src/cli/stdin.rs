//! Text on stdin beside a prompt that a flag gives. A pipe that nothing is written to must not hold
//! up a run for ever: programs that start others often leave one open.

use super::prompt::read_prompt;
use crate::{Error, Result, interrupt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use std::fs;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

/// Seconds for which a pipe may be silent before it counts as left open.
const PATIENCE: i64 = 2;

/// Reads stdin, unless it is a terminal or stays silent.
///
/// A pipeline (`slow | moeba run …`) is waited for as long as it takes. A pipe whose other end is
/// with a process that started this one, or a socket, may be open for no reason.
pub fn text() -> Result<Option<String>> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Ok(None);
    }
    let Ok(stat) = rustix::fs::fstat(&stdin) else { return Ok(None) };
    let kind = FileType::from_raw_mode(stat.st_mode);
    let streams = matches!(kind, FileType::Fifo | FileType::Socket);
    if streams && !has_input(&stdin)? {
        if kind == FileType::Socket || is_inherited_pipe(stat.st_ino) {
            log::warn!(
                "stdin is open, but nothing came in {PATIENCE} s: answering the prompt alone; \
                 -f - waits for it, </dev/null does not"
            );
            return Ok(None);
        }
        log::warn!("waiting for text on stdin, to go with the prompt (</dev/null for none)");
        while !has_input(&stdin)? {}
    }
    read_prompt(Path::new("-")).map(|text| (!text.is_empty()).then_some(text))
}

/// Interrupts the program at the end of stdin; it has `grace` to stop by itself.
pub fn end_with_it(grace: Duration) -> Result<()> {
    let wait = move || {
        // Bytes mean nothing, and an error is an end.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        interrupt::set();
        std::thread::sleep(grace + Duration::from_secs(5));
        std::process::exit(interrupt::exit_code());
    };
    let thread = std::thread::Builder::new().name("lifeline".into()).spawn(wait);
    thread.map(drop).map_err(|e| Error::io("stdin", e))
}

/// Whether bytes or the end come soon. Ctrl-C is an error.
fn has_input(stdin: &impl AsFd) -> Result<bool> {
    let patience = Timespec { tv_sec: PATIENCE, tv_nsec: 0 };
    let mut fds = [PollFd::new(stdin, PollFlags::IN)];
    let n = match poll(&mut fds, Some(&patience)) {
        Err(rustix::io::Errno::INTR) => 0,
        n => n.map_err(|e| Error::io("stdin", e.into()))?,
    };
    interrupt::check()?;
    Ok(n > 0)
}

/// Whether a process that this one descends from can write to the pipe. In a shell's pipeline only
/// the neighbour can. A container's first process has its parent outside, and is taken for one.
fn is_inherited_pipe(inode: u64) -> bool {
    let mut parent = parent_of("self");
    loop {
        match parent {
            None | Some(0) => return parent_of("self") == Some(0),
            Some(pid) if can_write(pid, inode) => return true,
            Some(pid) => parent = parent_of(&pid.to_string()),
        }
    }
}

/// The fourth field of /proc/PID/stat; the second is a name in parentheses, with any letters.
fn parent_of(pid: &str) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Whether the process can write to the pipe. Other users' processes cannot be examined and count
/// as unable.
fn can_write(pid: u32, inode: u64) -> bool {
    let name = format!("pipe:[{inode}]");
    let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    fds.flatten().any(|fd| {
        let same = fs::read_link(fd.path()).is_ok_and(|link| link.as_os_str() == &*name);
        same && is_writable(&format!("/proc/{pid}/fdinfo/{}", fd.file_name().to_string_lossy()))
    })
}

fn is_writable(fdinfo: &str) -> bool {
    let Ok(info) = fs::read_to_string(fdinfo) else { return false };
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    // The lowest two bits: 0 reads, 1 writes, 2 does both.
    flags.is_some_and(|flags| flags & 3 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn the_writing_end_of_a_pipe_is_found() {
        let (reader, writer) = io::pipe().unwrap();
        let inode = rustix::fs::fstat(&reader).unwrap().st_ino;
        let me = std::process::id();
        assert!(can_write(me, inode));
        let info = |fd: i32| is_writable(&format!("/proc/self/fdinfo/{fd}"));
        assert!(info(writer.as_raw_fd()) && !info(reader.as_raw_fd()));
        drop(writer);
        assert!(!can_write(me, inode));
        assert!(parent_of("self").is_some_and(|parent| parent != me));
        assert!(parent_of("0").is_none());
    }
}
