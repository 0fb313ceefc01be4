//! Reads a chat's messages and commands from a terminal. A line is a message. One of several lines
//! stands between `"""`, has a backslash at the end of each line but the last, or is pasted in a
//! terminal that marks what is pasted (bracketed paste). Lines that are typed or pasted during an
//! answer are read one by one after it.

use super::super::commands::{self, Completion};
use super::super::out;
use crate::{Error, Result};
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{
    Behavior, Cmd, ConditionalEventHandler, Config, Editor, Event, EventContext, EventHandler,
    KeyCode, KeyEvent, Modifiers, RepeatCount,
};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

const QUOTES: &str = "\"\"\"";

/// At the end of a line: the message goes on in the next.
const CONTINUED: char = '\\';

/// The number of lines that the history keeps, and the first line of its file.
const HISTORY_LINES: usize = 10_000;
const HISTORY_MAGIC: &[u8] = b"#V2\n";

/// A user's input.
#[derive(Debug, PartialEq)]
pub enum Input {
    Message(String),
    Command(String, String),
    End,
}

/// Reads messages; the terminal's side of a chat.
pub struct Reader {
    editor: Editor<Completion, FileHistory>,
    history: Option<PathBuf>,
}

impl Reader {
    pub fn new() -> Result<Self> {
        // The prompt goes to the terminal itself: stdout carries answers only.
        let config = Config::builder().behavior(Behavior::PreferTerm).auto_add_history(true);
        let config = config.max_history_size(HISTORY_LINES).map_err(terminal_error)?;
        let mut editor: Editor<Completion, FileHistory> =
            Editor::with_config(config.build()).map_err(terminal_error)?;
        editor.set_helper(Some(Completion));
        let tab = EventHandler::Conditional(Box::new(Tab));
        editor.bind_sequence(KeyEvent(KeyCode::Tab, Modifiers::NONE), tab);
        // The terminal keeps a Ctrl-D that is typed during an answer as a NUL.
        editor.bind_sequence(KeyEvent::ctrl('@'), Cmd::EndOfFile);
        let history = history_file().filter(|path| is_history(path));
        if let Some(path) = &history {
            let _ = path.parent().map(std::fs::create_dir_all);
            // There is none the first time.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history })
    }

    /// The next message or command. Ctrl-C empties the line; twice in a row it ends the program.
    pub fn next(&mut self) -> Result<Input> {
        let mut lines: Vec<String> = Vec::new();
        let mut cancelled = false;
        loop {
            let prompt = if lines.is_empty() { "> " } else { ". " };
            match self.editor.readline(prompt) {
                Ok(line) => {
                    cancelled = false;
                    self.keep_history();
                    lines.push(line);
                }
                Err(ReadlineError::Interrupted) if cancelled => return Err(Error::Interrupted),
                Err(ReadlineError::Interrupted) => {
                    cancelled = true;
                    lines.clear();
                    out::say("(Ctrl-C again or Ctrl-D ends the chat)");
                    continue;
                }
                Err(ReadlineError::Io(e)) if e.kind() == io::ErrorKind::InvalidData => {
                    log::warn!("this line is not UTF-8 text, so it is not sent");
                    continue;
                }
                Err(ReadlineError::Eof) => return Ok(Input::End),
                Err(e) => return Err(terminal_error(e)),
            }
            if let Some(input) = parse(&lines) {
                return Ok(input);
            }
        }
    }

    /// Appends the last line to the history, which other chats write to as well.
    fn keep_history(&mut self) {
        if let Some(path) = &self.history {
            // A history that cannot be kept is no reason to fail a chat.
            let _ = self.editor.append_history(path);
        }
    }
}

/// Completes commands. A tab in other lines is text, which may be pasted.
struct Tab;

impl ConditionalEventHandler for Tab {
    fn handle(
        &self,
        _: &Event,
        n: RepeatCount,
        _: bool,
        context: &EventContext<'_>,
    ) -> Option<Cmd> {
        let is_text = !context.line().starts_with('/');
        is_text.then(|| Cmd::Insert(n, "\t".into()))
    }
}

fn terminal_error(e: ReadlineError) -> Error {
    Error::invalid(format!("cannot read from the terminal: {e}"))
}

/// MOEBA_HISTORY (empty for none), else where XDG keeps such state.
fn history_file() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("MOEBA_HISTORY") {
        return (!path.is_empty()).then(|| path.into());
    }
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local").join("state")))?;
    Some(state.join("moeba").join("history"))
}

/// Whether the file is a history or can become one; says so if not, as it would be replaced.
fn is_history(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(HISTORY_MAGIC.len() as u64).read_to_end(&mut start));
    let fits = match read {
        Ok(n) => n == 0 || start == HISTORY_MAGIC,
        Err(e) => e.kind() == io::ErrorKind::NotFound,
    };
    if !fits {
        log::warn!("{}: not a chat history, so no history is kept", path.display());
    }
    fits
}

/// Parses the lines so far; `None` while a message is incomplete or empty.
fn parse(lines: &[String]) -> Option<Input> {
    let first = lines.first()?.trim();
    if let Some(opened) = first.strip_prefix(QUOTES) {
        let mut text = opened.to_owned();
        for line in &lines[1..] {
            text.push('\n');
            text.push_str(line);
        }
        let text = text.trim_end().strip_suffix(QUOTES)?;
        return Some(Input::Message(text.trim_matches('\n').to_owned()));
    }
    // A space before it makes a command a message.
    if let Some((name, rest)) = commands::split(&lines[0]) {
        return Some(match name {
            "exit" | "quit" | "bye" => Input::End,
            _ => Input::Command(name.to_owned(), rest.to_owned()),
        });
    }
    let last = lines.last()?;
    if last.ends_with(CONTINUED) {
        return None;
    }
    let continued = |line: &String| line.strip_suffix(CONTINUED).unwrap_or(line).to_owned();
    let text = lines.iter().map(continued).collect::<Vec<_>>().join("\n");
    // An empty line asks nothing; the reader goes on.
    Some(Input::Message(text.trim().to_owned()))
}

/// One message from the terminal: `--single-turn` without a prompt.
pub fn read_message() -> Result<String> {
    let mut reader = Reader::new()?;
    loop {
        return match reader.next()? {
            Input::Message(text) if text.is_empty() => continue,
            Input::Message(text) => Ok(text),
            Input::Command(name, rest) => Ok(format!("/{name} {rest}").trim_end().to_owned()),
            Input::End => Err(Error::Usage("there is no message to answer".into())),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<Input> {
        parse(&text.split('\n').map(str::to_owned).collect::<Vec<_>>())
    }

    fn message(text: &str) -> Option<Input> {
        Some(Input::Message(text.into()))
    }

    #[test]
    fn lines_are_messages_or_commands() {
        assert_eq!(parsed(" hello "), message("hello"));
        assert_eq!(parsed("/exit"), Some(Input::End));
        let set = Input::Command("set".into(), "temp 0.5".into());
        assert_eq!(parsed("/set  temp 0.5 "), Some(set));
        for text in [" /set temp", "/etc/passwd is what?"] {
            assert_eq!(parsed(text), message(text.trim()));
        }
    }

    #[test]
    fn a_backslash_at_the_end_of_a_line_continues_it() {
        assert_eq!(parsed("one\\"), None);
        assert_eq!(parsed("one\\\ntwo\\"), None);
        assert_eq!(parsed("one\\\n/two\\n"), message("one\n/two\\n"));
        assert_eq!(parsed("one\\\n"), message("one"));
    }

    #[test]
    fn quotes_hold_several_lines() {
        assert_eq!(parsed("\"\"\"one\ntwo"), None);
        assert_eq!(parsed("\"\"\""), None);
        assert_eq!(parsed("\"\"\"one\ntwo\"\"\""), message("one\ntwo"));
        assert_eq!(parsed("\"\"\"\n/exit\n\"\"\""), message("/exit"));
        assert_eq!(parsed("\"\"\"one\"\"\""), message("one"));
    }
}
