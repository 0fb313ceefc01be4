//! Parts a model's text into reasoning, content and calls while it comes.

use super::calls::CallScanner;
use super::table::Call;
use super::{Calls, Event};
use crate::chat::reasoning::{self, Delta, Format, TextKind};

/// The scanner of one answer. However the text is cut into pieces, the events say the same.
#[derive(Clone, Debug)]
pub struct Scanner {
    reasoning: reasoning::Scanner,
    calls: CallScanner,
    has_reasoning: bool,
    /// Markers since the last text, where a header may name a function.
    header: String,
}

impl Scanner {
    /// For what follows `prompt`. Without `calls` no call is looked for.
    pub fn new(format: Option<&'static Format>, calls: Option<Calls>, prompt: &str) -> Self {
        let mut reasoning = reasoning::Scanner::new(format, prompt);
        let ends = calls.as_ref().map(|calls| calls.format).filter(|f| f.ends_reasoning);
        if let Some(opener) = ends.and_then(|format| format.openers().first().copied()) {
            reasoning = reasoning.interrupted_by(opener);
        }
        let calls = CallScanner::new(calls);
        Self { reasoning, calls, has_reasoning: false, header: String::new() }
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        let deltas = self.reasoning.push(text);
        self.take(&deltas)
    }

    /// The text that was held back, when no more follows. A call that goes on is cut off: its
    /// arguments are what came of them.
    pub fn finish(&mut self) -> Vec<Event> {
        let deltas = self.reasoning.finish();
        let mut events = self.take(&deltas);
        self.calls.finish();
        events.append(&mut self.calls.ready);
        events
    }

    /// Ends a text that was cut: the beginning of a marker, or of a call without a name, is
    /// dropped.
    pub fn cut(&mut self) -> Vec<Event> {
        let deltas = self.reasoning.cut();
        let mut events = self.take(&deltas);
        self.calls.cut();
        events.append(&mut self.calls.ready);
        events
    }

    /// Whether what comes next is reasoning, unless a marker ends it.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.is_reasoning() && !self.calls.is_message()
    }

    /// How many calls have begun.
    pub fn n_calls(&self) -> usize {
        self.calls.n_calls
    }

    fn take(&mut self, deltas: &[Delta]) -> Vec<Event> {
        for Delta { part, text } in deltas {
            match part {
                TextKind::Marker => self.marker(text),
                _ if self.calls.is_message() => self.calls.message(text),
                TextKind::Content => self.calls.push(text),
                TextKind::Reasoning => {
                    let line = std::mem::take(&mut self.calls.is_apart) && self.has_reasoning;
                    self.has_reasoning = true;
                    let text = if line { format!("\n{text}") } else { text.clone() };
                    self.calls.ready.push(Event::Reasoning(text));
                }
            }
        }
        std::mem::take(&mut self.calls.ready)
    }

    /// A marker ends a message, or is a header and begins one, or both.
    fn marker(&mut self, text: &str) {
        self.calls.set_apart();
        let format = self.calls.calls.as_ref().map(|calls| calls.format);
        let Some(Call::Header { to, message }) = format.map(|format| &format.call) else { return };
        self.header.push_str(text);
        loop {
            if self.calls.is_message() && !self.header.is_empty() {
                self.calls.end_message();
            }
            let Some(at) = self.header.find(message) else { break };
            let header: String = self.header.drain(..at + message.len()).collect();
            let name = header.split_once(to).map_or("", |(_, name)| name);
            let name = name.split(|c: char| c.is_whitespace() || c == '<').next();
            if let Some(name) = name.filter(|name| super::declared::is_name(name)) {
                self.calls.begin_message(name);
            }
        }
    }
}
