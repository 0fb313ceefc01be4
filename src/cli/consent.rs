//! The question before a large download: how much it is, how long it takes, and whether there is
//! room for it.

use super::{figures, out};
use crate::engine::plan::memory;
use crate::hub::Ahead;
use crate::units::{at_most, size};
use crate::{Error, Result, interrupt, terminal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;

/// A download of fewer bytes is begun without a question.
const ASKED_FROM: u64 = 1 << 30;

/// Time for which bytes are received to see how fast they come.
const SAMPLE: Duration = Duration::from_secs(1);

/// Asks on a terminal; without one the answer is yes.
pub fn ask(wanted: &str, ahead: &Ahead) -> Result<bool> {
    let (stdin, stderr) = (io::stdin(), io::stderr());
    let can_ask = stdin.is_terminal() && stderr.is_terminal() && !terminal::is_quiet();
    if ahead.n_bytes < ASKED_FROM || !can_ask {
        return Ok(true);
    }
    let rate = (ahead.rate)(SAMPLE);
    out::say(&outlook(wanted, ahead.n_bytes, rate, ahead.free_bytes, memory::available_bytes()));
    loop {
        terminal::without_bar(|| {
            let mut stderr = io::stderr().lock();
            let asked = stderr.write_all(b"Download it? [Y/n] ").and_then(|()| stderr.flush());
            asked.map_err(|e| Error::io("stderr", e))
        })?;
        match answer(&line()?) {
            Some(answer) => return Ok(answer),
            None => out::say("please answer y or n"),
        }
    }
}

/// A line of stdin; Ctrl-C is an error, and the end a no.
fn line() -> Result<String> {
    let stdin = io::stdin();
    let patience = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    loop {
        interrupt::check()?;
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut fds, Some(&patience)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            n => n.map_err(|e| Error::io("stdin", e.into()))?,
        };
        let mut line = String::new();
        let n = stdin.lock().read_line(&mut line).map_err(|e| Error::io("stdin", e))?;
        return Ok(if n == 0 { "n".into() } else { line });
    }
}

/// Yes, no, or neither; Enter alone is a yes.
fn answer(line: &str) -> Option<bool> {
    match line.trim().to_lowercase().as_str() {
        "" | "y" | "yes" => Some(true),
        "n" | "no" => Some(false),
        _ => None,
    }
}

/// `a/b: 17.28 GiB to download, about 3 min at 98 MB/s; …`
fn outlook(
    wanted: &str,
    n_bytes: u64,
    rate: Option<f64>,
    free: Option<u64>,
    memory: Option<u64>,
) -> String {
    let mut parts = vec![format!("{wanted}: {} to download", size(n_bytes))];
    if let Some(rate) = rate.filter(|rate| *rate > 0.0) {
        let time = figures::long_time(Duration::from_secs_f64(n_bytes as f64 / rate));
        parts[0] += &format!(", about {time} at {:.1} MB/s", rate / 1e6);
    }
    // Where there is less, the download was refused.
    parts.extend(free.map(|free| format!("the disk has {} free", at_most(free))));
    parts.extend(memory.map(|memory| match n_bytes <= memory {
        true => format!("it fits in memory ({} free)", at_most(memory)),
        false => format!(
            "it is larger than the free memory ({}), so experts will be read from disk",
            at_most(memory)
        ),
    }));
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_yes_no_or_neither() {
        for (line, expected) in
            [("\n", Some(true)), ("Y\n", Some(true)), (" no \n", Some(false)), ("x\n", None)]
        {
            assert_eq!(answer(line), expected, "{line:?}");
        }
    }

    #[test]
    fn the_outlook_says_what_is_known() {
        let gib = |n: u64| n << 30;
        assert_eq!(
            outlook("a/b", gib(18), Some(100e6), Some(gib(50)), Some(gib(8))),
            "a/b: 18.00 GiB to download, about 4 min at 100.0 MB/s; the disk has 50.00 GiB free; \
             it is larger than the free memory (8.00 GiB), so experts will be read from disk"
        );
        assert_eq!(
            outlook("a/b", gib(2), None, None, Some(gib(8))),
            "a/b: 2.00 GiB to download; it fits in memory (8.00 GiB free)"
        );
    }
}
