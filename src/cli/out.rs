//! Standard output and standard error. stdout carries text or JSON only; `println!` would panic
//! when the reader of a pipe has gone, which is the reader's good right (`moeba run … | head`).

use crate::{Error, Result};
use std::io::{self, Write};

/// The path that errors of stdout carry.
const STDOUT: &str = "stdout";

/// Writes and flushes, so that a pipe sees text as soon as it is there.
pub fn write(bytes: &[u8]) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|e| Error::io(STDOUT, e))
}

/// `write` with a line end.
pub fn line(text: &str) -> Result<()> {
    write(format!("{text}\n").as_bytes())
}

/// Whether the reader of our output has gone: no fault, and nobody left to tell.
pub fn is_broken_pipe(error: &Error) -> bool {
    matches!(error, Error::Io { path, source }
        if path.as_os_str() == STDOUT && source.kind() == io::ErrorKind::BrokenPipe)
}

/// A line on stderr, whoever listens.
pub fn complain(text: &str) {
    // Nothing can be done for a message that cannot be shown.
    let _ = writeln!(io::stderr().lock(), "{}", one_line(text));
}

/// What a file or a flag puts into a message must not move the cursor or start a line.
fn one_line(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn messages_stay_on_one_line() {
        assert_eq!(super::one_line("a\nb\u{1b}[2Jé"), "a\\nb\\u{1b}[2Jé");
    }
}
