//! Standard output and standard error. stdout carries text or JSON only; `println!` would panic
//! when the reader of a pipe has gone, which is the reader's good right (`moeba run … | head`).

use crate::terminal;
use crate::{Error, Result};
use std::io::{self, Write};

/// The path that errors of stdout carry.
const STDOUT: &str = "stdout";

/// Writes and flushes, so that a pipe sees text as soon as it is there.
pub fn write(bytes: &[u8]) -> Result<()> {
    terminal::without_bar(|| {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|e| Error::io(STDOUT, e))
    })
}

/// `write` with a line end.
pub fn line(text: &str) -> Result<()> {
    write(format!("{text}\n").as_bytes())
}

/// Whether the reader of our output is gone. That is no error, and there is no one to report it to.
pub fn is_broken_pipe(error: &Error) -> bool {
    matches!(error, Error::Io { path, source }
        if path.as_os_str() == STDOUT && source.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes the reply to a chat command to stderr, with -q too.
pub fn say(text: &str) {
    text.lines().for_each(|text| terminal::line(&one_line(text)));
}

/// A line on stderr about work that was done; none with -q.
pub fn note(text: &str) {
    if !terminal::is_quiet() {
        say(text);
    }
}

/// A line on stderr that stands back on a terminal; none with -q.
pub fn aside(text: &str) {
    if terminal::is_quiet() {
        return;
    }
    let text = one_line(text);
    match terminal::has_colours() {
        true => terminal::line(&format!("\x1b[2m{text}\x1b[0m")),
        false => terminal::line(&text),
    }
}

/// The beginning of a message of this level: "error: ", in colour on a terminal.
pub fn kind(level: log::Level, has_colours: bool) -> &'static str {
    match (level, has_colours) {
        (log::Level::Error, true) => "\x1b[1;31merror:\x1b[0m ",
        (log::Level::Error, false) => "error: ",
        (log::Level::Warn, true) => "\x1b[1;33mwarning:\x1b[0m ",
        (log::Level::Warn, false) => "warning: ",
        _ => "",
    }
}

/// An error, in one line on stderr.
pub fn complain(text: &str) {
    let kind = kind(log::Level::Error, terminal::has_colours());
    terminal::line(&format!("{kind}{}", one_line(text)));
}

/// Escapes control characters, so that text from files and flags cannot move the cursor or start a
/// line.
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
