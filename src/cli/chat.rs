//! The interactive chat of `moeba run`: lines from a terminal, commands that begin with a slash,
//! messages of several lines between `"""`.

use super::commands::{self, Completion};
use super::conversation::Conversation;
use super::generate::{End, Outcome, Request};
use super::out;
use super::prompt::read_prompt;
use super::run::{Run, context_full, was_interrupted};
use super::sampling::{self, n_predict};
use super::values::Parsed;
use crate::{Error, Result, interrupt};
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Behavior, Config, Editor};
use std::path::{Path, PathBuf};

const QUOTES: &str = "\"\"\"";

/// At the end of a line: the message goes on in the next.
const CONTINUED: char = '\\';

/// What someone typed.
#[derive(Debug, PartialEq)]
enum Input {
    Message(String),
    Command(String, String),
    End,
}

/// Reads messages; the terminal's side of a chat.
struct Reader {
    editor: Editor<Completion, FileHistory>,
    history: Option<PathBuf>,
}

impl Reader {
    fn new() -> Result<Self> {
        // The prompt goes to the terminal itself: stdout carries answers only.
        let config = Config::builder().behavior(Behavior::PreferTerm).auto_add_history(true);
        let mut editor = Editor::with_config(config.build()).map_err(terminal_error)?;
        editor.set_helper(Some(Completion));
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
                    out::say("(Ctrl-C again or Ctrl-D ends the chat)");
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
    out::aside("/help lists the commands, /exit or Ctrl-D ends the chat");
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
            out::say("(interrupted)");
        }
        match answer.is_empty() && outcome.end == End::Interrupted {
            true => drop(self.conversation.take_back("user")),
            false => self.conversation.add_assistant(&answer),
        }
        if outcome.end == End::ContextFull {
            log::warn!("{}; /clear starts over", context_full(self.run.generator.engine().n_ctx()));
        }
        outcome.tell();
        self.last = Some(outcome);
        // SIGTERM and SIGHUP end the chat, not the answer alone.
        interrupt::check()
    }

    fn command(&mut self, name: &str, rest: &str) -> Result<()> {
        match name {
            "help" | "?" => out::say(&commands::help()),
            "clear" => {
                self.conversation.clear();
                self.run.generator.clear();
                out::say("the conversation is forgotten");
            }
            "regen" => return self.regenerate(),
            "stats" => self.stats(),
            "system" => {
                self.conversation.set_system(rest);
                out::say(match rest {
                    "" => "there is no system prompt now",
                    _ => "the system prompt is set",
                });
            }
            "set" => match self.set(rest) {
                Ok(said) => out::say(&said),
                Err(why) => out::say(&format!("/set {rest}: {why}")),
            },
            "read" if rest.is_empty() => out::say("/read needs the name of a file"),
            "read" => match read_prompt(Path::new(rest)) {
                Ok(text) => return self.message(&text),
                Err(e) => out::complain(&e.to_string()),
            },
            _ => out::say(&format!("there is no command /{name}; /help lists all")),
        }
        Ok(())
    }

    fn regenerate(&mut self) -> Result<()> {
        if !self.conversation.take_back("assistant") {
            out::say("there is no answer yet to give again");
            return Ok(());
        }
        let said = self.answer();
        tell(said)
    }

    /// Changes an option; without a value it is shown, and without a name all are.
    fn set(&mut self, text: &str) -> Parsed<String> {
        let (name, value) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let is_n = matches!(name, "n" | "predict" | "n-predict");
        match value.trim() {
            "" => {}
            value if is_n => self.run.limits.n_predict = usize::try_from(n_predict(value)?).ok(),
            value => sampling::set(&mut self.run.sampling, name, value)?,
        }
        let mut all = sampling::settings(&self.run.sampling);
        all.push(("n", self.run.limits.n_predict.map_or("-1".into(), |n| n.to_string())));
        let name = if is_n { "n".into() } else { sampling::canonical(name) };
        let row = |(name, value): &(&str, String)| format!("{name:<17}  {value}");
        match all.iter().find(|(known, _)| *known == name) {
            Some((name, value)) => Ok(format!("{name} is {value}")),
            None if name.is_empty() => Ok(all.iter().map(row).collect::<Vec<_>>().join("\n")),
            None => Err(sampling::unknown(&self.run.sampling)),
        }
    }

    fn stats(&self) {
        let n_ctx = self.run.generator.engine().n_ctx();
        let used = self.run.generator.n_past();
        out::say(&format!("{used} of {n_ctx} tokens of context used"));
        match &self.last {
            Some(outcome) if used > 0 => out::say(&outcome.report()),
            _ => out::say("nothing has been generated yet"),
        }
    }
}

/// A prompt that does not fit or a template that refuses it ends a message, not the chat. What
/// else goes wrong (stdout gone, weights that are no numbers) ends the program.
fn tell(result: Result<()>) -> Result<()> {
    match result {
        Err(e @ Error::Invalid(_)) => {
            out::complain(&e.to_string());
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
