//! The interactive chat of `moeba run`: messages and commands from a terminal, answers to stdout.

mod echo;
mod reader;

use super::commands;
use super::conversation::{Conversation, Prompt};
use super::figures::counted;
use super::prompt::read_prompt;
use super::run::{NO_CONTENT, Run, context_full, was_interrupted};
use super::sampling::{self, n_predict};
use super::values::Parsed;
use super::{out, outcome};
use crate::engine::{FinishReason, Outcome};
use crate::{Error, Result, interrupt};
use echo::Silence;
use reader::{Input, Reader};
use std::path::Path;

pub use reader::read_message;

struct Chat {
    run: Run,
    conversation: Conversation,
    /// A message without an answer: no part of the conversation.
    unanswered: Option<String>,
    /// Texts of files that go before the next message.
    attached: Vec<String>,
    last: Option<Outcome>,
    n_answers: u64,
}

/// Chats until the end of input; `first` is a message that was given as a flag.
pub fn run(run: Run, conversation: Conversation, first: Option<String>) -> Result<()> {
    let mut reader = Reader::new()?;
    let (unanswered, attached) = (None, Vec::new());
    let mut chat = Chat { run, conversation, unanswered, attached, last: None, n_answers: 0 };
    out::aside("/help lists the commands, /exit or Ctrl-D ends the chat");
    if let Some(message) = first {
        chat.message(&message)?;
    }
    loop {
        match reader.next()? {
            Input::End => break,
            Input::Message(text) if text.is_empty() => {}
            Input::Message(text) => chat.send(text)?,
            Input::Command(name, rest) => chat.command(&name, &rest)?,
        }
    }
    match &chat.last {
        Some(outcome) => chat.run.write_stats(outcome),
        None => Ok(()),
    }
}

impl Chat {
    /// Sends a message, behind the texts of files that were read for it.
    fn send(&mut self, text: String) -> Result<()> {
        self.attached.push(text);
        let parts = std::mem::take(&mut self.attached);
        self.message(&parts.join("\n\n"))
    }

    fn message(&mut self, text: &str) -> Result<()> {
        self.conversation.add_user(text);
        report(self.answer())
    }

    /// Answers the last message. One that gets no answer is taken back: the next one must not
    /// follow on it.
    fn answer(&mut self) -> Result<()> {
        let said = self.try_answer();
        self.unanswered = match said {
            Ok(true) => None,
            _ => self.conversation.take_back("user"),
        };
        said.map(drop)
    }

    /// Whether an answer came.
    fn try_answer(&mut self) -> Result<bool> {
        let prompt = self.prompt()?;
        let mut sampling = self.run.sampling.clone();
        // Each answer has a seed of its own, and the first seed determines the whole chat.
        sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(self.n_answers));
        let silence = Silence::begin();
        let (outcome, answer) = self.run.reply(prompt, sampling)?;
        drop(silence);
        self.n_answers += 1;
        if was_interrupted(&outcome) {
            out::say("(interrupted)");
        }
        let came = !answer.content.is_empty();
        match came {
            true => self.conversation.add_assistant(&answer),
            false => out::say(&format!("{NO_CONTENT}; /regen sends the message again")),
        }
        if outcome.finish == FinishReason::ContextFull {
            let full = context_full(self.run.generator.engine().n_ctx());
            log::warn!("{full}; the oldest messages leave the chat when it goes on");
        }
        outcome::print(&outcome);
        self.last = Some(outcome);
        // SIGTERM and SIGHUP end the chat, not the answer alone.
        interrupt::check()?;
        Ok(came)
    }

    /// The prompt for the next answer. The oldest messages leave a chat that has filled three
    /// quarters of the context, until it fills a half of it.
    fn prompt(&mut self) -> Result<Prompt> {
        let engine = self.run.generator.engine();
        let (n_ctx, tokenizer) = (engine.n_ctx(), engine.tokenizer());
        let n_before = self.conversation.n_messages();
        let mut prompt = self.conversation.prompt(tokenizer)?;
        let mut most = n_ctx - n_ctx / 4;
        while prompt.tokens.len() > most && self.conversation.forget_oldest() {
            prompt = self.conversation.prompt(tokenizer)?;
            most = n_ctx / 2;
        }
        match n_before - self.conversation.n_messages() {
            0 => {}
            n => out::say(&format!(
                "(the context of {n_ctx} tokens is full: the {n} oldest messages have left it)"
            )),
        }
        Ok(prompt)
    }

    fn command(&mut self, name: &str, rest: &str) -> Result<()> {
        match name {
            "help" | "?" => out::say(&commands::help()),
            // A number of messages, for instance, would not be kept.
            "clear" | "regen" | "stats" if !rest.is_empty() => {
                out::say(&format!("/{name} stands alone: leave out what follows it"));
            }
            "clear" => {
                self.conversation.clear();
                self.unanswered = None;
                self.attached.clear();
                self.run.generator.clear();
                out::say("the conversation is forgotten");
            }
            "regen" => return self.regenerate(),
            "stats" => self.stats(),
            "think" => match self.think(rest) {
                Ok(said) => out::say(&said),
                Err(why) => out::say(&format!("/think {rest}: {why}")),
            },
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
            "read" | "save" | "load" if rest.is_empty() => {
                out::say(&format!("/{name} needs the name of a file"));
            }
            "read" | "save" | "load" => match self.with_file(name, Path::new(rest)) {
                Ok(said) => out::say(&said),
                Err(e) => out::complain(&e.to_string()),
            },
            _ => out::say(&format!("there is no command /{name}; /help lists all")),
        }
        Ok(())
    }

    fn with_file(&mut self, command: &str, path: &Path) -> Result<String> {
        let name = path.display();
        Ok(match command {
            "read" => {
                let text = read_prompt(path)?;
                let n = counted(text.lines().count(), "line");
                self.attached.push(format!("{name}:\n\n{text}"));
                format!("{name} goes with the next message: {n}")
            }
            "save" => {
                self.conversation.save(path)?;
                format!("the conversation is in {name}")
            }
            _ => {
                self.conversation.load(path)?;
                self.unanswered = None;
                let n = counted(self.conversation.n_messages(), "message");
                format!("the conversation of {name} goes on: {n}")
            }
        })
    }

    fn regenerate(&mut self) -> Result<()> {
        if let Some(text) = self.unanswered.take() {
            return self.message(&text);
        }
        if self.conversation.take_back("assistant").is_none() {
            out::say("there is no answer to repeat yet");
            return Ok(());
        }
        report(self.answer())
    }

    /// Changes how the model thinks; without a level it is shown.
    fn think(&mut self, level: &str) -> Parsed<String> {
        if !level.is_empty() {
            self.run.reasoning.set("think", level)?;
            let reasoning = &self.run.reasoning;
            self.conversation.set_reasoning(reasoning).map_err(|e| e.to_string())?;
        }
        Ok(format!("thinking is {}", self.run.reasoning.think()))
    }

    /// Changes an option; without a value it is shown, and without a name all are.
    fn set(&mut self, text: &str) -> Parsed<String> {
        let (name, value) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let is_n = matches!(name, "n" | "predict" | "n-predict");
        match value.trim() {
            "" => {}
            value if self.run.reasoning.set(name, value)? => {
                let reasoning = &self.run.reasoning;
                self.conversation.set_reasoning(reasoning).map_err(|e| e.to_string())?;
            }
            value if is_n => self.run.limits.n_predict = usize::try_from(n_predict(value)?).ok(),
            value => sampling::set(&mut self.run.sampling, name, value)?,
        }
        let mut all = sampling::settings(&self.run.sampling);
        all.push(("n", self.run.limits.n_predict.map_or("-1".into(), |n| n.to_string())));
        all.extend(self.run.reasoning.settings());
        let name = if is_n { "n".into() } else { sampling::canonical(name) };
        let row = |(name, value): &(&str, String)| format!("{name:<20}  {value}");
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
            Some(outcome) if used > 0 => out::say(&outcome::report(outcome)),
            _ => out::say("nothing has been generated yet"),
        }
    }
}

/// A prompt that does not fit or a template that refuses it ends a message, not the chat. What
/// else goes wrong (stdout gone, weights that are no numbers) ends the program.
fn report(result: Result<()>) -> Result<()> {
    match result {
        Err(e @ Error::Invalid(_)) => {
            out::complain(&e.to_string());
            Ok(())
        }
        other => other,
    }
}
