//! The interactive chat of `moeba run`: lines from a terminal, commands that begin with a slash,
//! messages of several lines between `"""`.

use super::conversation::Conversation;
use super::generate::{End, Outcome, Request};
use super::out;
use super::prompt::read_prompt;
use super::run::{Run, context_full, was_interrupted};
use super::sampling::{self, n_predict};
use super::values::Parsed;
use crate::{Error, Result};
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Behavior, Config, Editor};
use std::path::{Path, PathBuf};

const HELP: &str = "\
/exit, /quit      end (also Ctrl-D)
/clear            forget the conversation
/regen            answer the last message again
/read FILE        send a file as the message
/system TEXT      what the model is told before the first message
/set NAME VALUE   temp, top-k, top-p, min-p, repeat-penalty, …, seed, n
/stats            figures of the last answer
\"\"\"               begins and ends a message of several lines
Ctrl-C            ends an answer; at the prompt, twice ends the program";

const QUOTES: &str = "\"\"\"";

/// What someone typed.
#[derive(Debug, PartialEq)]
enum Input {
    Message(String),
    Command(String, String),
    End,
}

/// Reads messages; the terminal's side of a chat.
struct Reader {
    editor: Editor<(), FileHistory>,
    history: Option<PathBuf>,
}

impl Reader {
    fn new() -> Result<Self> {
        // The prompt goes to the terminal itself: stdout carries answers only.
        let config = Config::builder().behavior(Behavior::PreferTerm).auto_add_history(true);
        let mut editor = Editor::with_config(config.build()).map_err(terminal_error)?;
        let history = history_file();
        if let Some(path) = &history {
            // None the first time.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history })
    }

    /// The next message or command. Ctrl-C empties the line; twice in a row it ends the program.
    fn next(&mut self) -> Result<Input> {
        let mut lines: Vec<String> = Vec::new();
        let mut cancelled = false;
        loop {
            let prompt = if lines.is_empty() { "> " } else { ". " };
            match self.editor.readline(prompt) {
                Ok(line) => {
                    cancelled = false;
                    lines.push(line);
                }
                Err(ReadlineError::Interrupted) if cancelled => return Err(Error::Interrupted),
                Err(ReadlineError::Interrupted) => {
                    cancelled = true;
                    lines.clear();
                    log::info!("(Ctrl-C again or Ctrl-D ends the chat)");
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
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(path) = &self.history {
            // A history that cannot be kept is no reason to fail a chat.
            let _ = path.parent().map(std::fs::create_dir_all);
            let _ = self.editor.save_history(path);
        }
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

/// What the lines so far say; `None` while a message goes on or is empty.
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
    if let Some(command) = first.strip_prefix('/') {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        return Some(match name {
            "exit" | "quit" | "bye" => Input::End,
            _ => Input::Command(name.to_owned(), rest.trim().to_owned()),
        });
    }
    // An empty line asks nothing; the reader goes on.
    Some(Input::Message(first.to_owned()))
}

/// One message from the terminal: `--single-turn` without a prompt.
pub fn read_message() -> Result<String> {
    match Reader::new()?.next()? {
        Input::Message(text) => Ok(text),
        Input::Command(name, rest) => Ok(format!("/{name} {rest}").trim_end().to_owned()),
        Input::End => Err(Error::Usage("there is no message to answer".into())),
    }
}

struct Chat {
    run: Run,
    conversation: Conversation,
    last: Option<Outcome>,
    n_answers: u64,
}

/// Chats until the end of input; `first` is a message that was given as a flag.
pub fn run(run: Run, conversation: Conversation, first: Option<String>) -> Result<()> {
    let mut reader = Reader::new()?;
    let mut chat = Chat { run, conversation, last: None, n_answers: 0 };
    log::info!("/help lists the commands, /exit or Ctrl-D ends the chat");
    if let Some(message) = first {
        chat.message(&message)?;
    }
    loop {
        match reader.next()? {
            Input::End => break,
            Input::Message(text) if text.is_empty() => {}
            Input::Message(text) => chat.message(&text)?,
            Input::Command(name, rest) => chat.command(&name, &rest)?,
        }
    }
    match &chat.last {
        Some(outcome) => chat.run.write_stats(outcome),
        None => Ok(()),
    }
}

impl Chat {
    fn message(&mut self, text: &str) -> Result<()> {
        self.conversation.add_user(text);
        let said = self.answer();
        if said.is_err() {
            // The message had no answer: the next one must not follow on it.
            self.conversation.take_back("user");
        }
        tell(said)
    }

    fn answer(&mut self) -> Result<()> {
        let prompt = self.conversation.tokens()?;
        let mut sampling = self.run.sampling.clone();
        // Each answer draws anew, and the whole chat follows from the first seed.
        sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(self.n_answers));
        let limits = &self.run.limits;
        let request = Request::continuing(&prompt, sampling, limits, true);
        let mut answer = String::new();
        let outcome = self.run.generator.generate(request, &mut |text| {
            answer.push_str(text);
            out::write(text.as_bytes())
        })?;
        out::line("")?;
        self.n_answers += 1;
        if was_interrupted(&outcome) {
            log::info!("(interrupted)");
        }
        match answer.is_empty() && outcome.end == End::Interrupted {
            true => drop(self.conversation.take_back("user")),
            false => self.conversation.add_assistant(&answer),
        }
        if outcome.end == End::ContextFull {
            log::warn!("{}; /clear begins anew", context_full(self.run.generator.engine().n_ctx()));
        }
        log::debug!("{}", outcome.report());
        self.last = Some(outcome);
        Ok(())
    }

    fn command(&mut self, name: &str, rest: &str) -> Result<()> {
        match name {
            "help" | "?" => log::info!("{HELP}"),
            "clear" => self.conversation.clear(),
            "regen" => return self.regenerate(),
            "stats" => self.stats(),
            "system" => self.conversation.set_system(rest),
            "set" => match self.set(rest) {
                Ok(()) => {}
                Err(why) => log::warn!("/set {rest}: {why}"),
            },
            "read" if rest.is_empty() => log::warn!("/read needs a file's name"),
            "read" => match read_prompt(Path::new(rest)) {
                Ok(text) => return self.message(&text),
                Err(e) => log::warn!("{e}"),
            },
            _ => log::warn!("there is no command /{name}; /help lists them"),
        }
        Ok(())
    }

    fn regenerate(&mut self) -> Result<()> {
        if !self.conversation.take_back("assistant") {
            log::warn!("there is no answer yet to give again");
            return Ok(());
        }
        let said = self.answer();
        tell(said)
    }

    fn set(&mut self, text: &str) -> Parsed<()> {
        let (name, value) = text.split_once(char::is_whitespace).ok_or("expected NAME VALUE")?;
        let value = value.trim();
        if matches!(name, "n" | "predict" | "n-predict") {
            self.run.limits.n_predict = usize::try_from(n_predict(value)?).ok();
            return Ok(());
        }
        sampling::set(&mut self.run.sampling, name, value)
    }

    fn stats(&self) {
        let n_ctx = self.run.generator.engine().n_ctx();
        log::info!("{} of {n_ctx} tokens of context used", self.run.generator.n_past());
        match &self.last {
            Some(outcome) => log::info!("{}", outcome.report()),
            None => log::info!("nothing was generated yet"),
        }
    }
}

/// A prompt that does not fit or a template that refuses it ends a message, not the chat. What
/// else goes wrong (stdout gone, weights that are no numbers) ends the program.
fn tell(result: Result<()>) -> Result<()> {
    match result {
        Err(e @ Error::Invalid(_)) => {
            log::warn!("{e}");
            Ok(())
        }
        other => other,
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
