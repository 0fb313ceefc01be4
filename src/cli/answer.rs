//! A chat's answer while it is written: parted into reasoning and content, shown, and kept for the
//! conversation.

use super::out;
use super::wrap::Wrap;
use crate::Result;
use crate::chat::reasoning::{Budget, ChatAnswer, Delta, Scanner, TextKind};
use crate::engine::TextSink;
use std::io::{self, IsTerminal};

/// llama.cpp's `--reasoning-format`: what becomes of reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Dim on a terminal, before the answer; elsewhere the answer alone is written.
    #[default]
    Apart,
    /// All as the model writes it, markers too; dim on a terminal.
    Legacy,
    /// All as the model writes it.
    None,
}

/// The kind of output that text is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Screen {
    /// A terminal that knows dim text.
    Styled,
    /// A terminal without styles, by NO_COLOR or by nature.
    Plain,
    /// A file or a pipe.
    Pipe,
}

impl Screen {
    pub fn stdout() -> Self {
        let var = |name| std::env::var_os(name).unwrap_or_default();
        match io::stdout().is_terminal() {
            false => Screen::Pipe,
            true if !var("NO_COLOR").is_empty() => Screen::Plain,
            true if var("TERM").is_empty() || var("TERM") == "dumb" => Screen::Plain,
            true => Screen::Styled,
        }
    }
}

/// Columns of the terminal that stdout is, if it is one.
fn n_columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some(usize::from(size.ws_col))
}

/// The state of writing an answer.
#[derive(Clone, Debug)]
struct View {
    format: ReasoningFormat,
    screen: Screen,
    wrap: Wrap,
    /// The part that was written last.
    last: Option<TextKind>,
}

impl View {
    /// The text to write for a delta.
    fn text(&mut self, delta: &Delta) -> String {
        let Delta { part, text } = delta;
        let is_apart = self.format == ReasoningFormat::Apart;
        match (self.format, part, self.screen) {
            (ReasoningFormat::Apart, TextKind::Reasoning, Screen::Pipe) => return String::new(),
            (ReasoningFormat::Apart, TextKind::Marker, _) => {
                // Two messages of reasoning are two lines.
                let between = self.last == Some(TextKind::Reasoning);
                self.last = self.last.map(|part| if between { TextKind::Marker } else { part });
                return String::new();
            }
            _ => {}
        }
        let plain = self.screen == Screen::Plain;
        let before = match (self.last.replace(*part), part) {
            _ if !is_apart => "",
            (None, TextKind::Reasoning) if plain => "[thinking]\n",
            (Some(TextKind::Marker), TextKind::Reasoning) => "\n",
            (Some(TextKind::Content), TextKind::Reasoning) => "\n\n",
            (Some(TextKind::Reasoning | TextKind::Marker), TextKind::Content) if plain => {
                "\n[answer]\n"
            }
            (Some(TextKind::Reasoning | TextKind::Marker), TextKind::Content) => "\n\n",
            _ => "",
        };
        let dim = self.screen == Screen::Styled
            && *part != TextKind::Content
            && self.format != ReasoningFormat::None;
        let (before, text) = (self.wrap.text(before), self.wrap.text(text));
        // Each piece ends its own style: nothing that ends the program leaves the terminal dim.
        if dim { format!("{before}\x1b[2m{text}\x1b[22m") } else { format!("{before}{text}") }
    }
}

/// Writes an answer to stdout.
pub struct Writer {
    scanner: Scanner,
    budget: Option<Budget>,
    view: View,
    answer: ChatAnswer,
}

impl Writer {
    pub fn new(
        scanner: Scanner,
        budget: Option<Budget>,
        format: ReasoningFormat,
        screen: Screen,
    ) -> Self {
        // Only a terminal that knows styles lets a word be taken from it.
        let wrap = Wrap::new(n_columns().filter(|_| screen == Screen::Styled));
        let view = View { format, screen, wrap, last: None };
        Self { scanner, budget, view, answer: ChatAnswer::default() }
    }

    fn show(&mut self, deltas: Vec<Delta>) -> Result<()> {
        for delta in deltas {
            self.answer.add(&delta);
            let text = self.view.text(&delta);
            if !text.is_empty() {
                out::write(text.as_bytes())?;
            }
        }
        Ok(())
    }

    /// Writes what was held back; the whole answer.
    pub fn finish(mut self) -> Result<ChatAnswer> {
        let rest = self.scanner.finish();
        self.show(rest)?;
        Ok(self.answer)
    }
}

impl TextSink for Writer {
    fn text(&mut self, text: &str) -> Result<()> {
        let deltas = self.scanner.push(text);
        self.show(deltas)
    }

    fn forced(&mut self, is_whole: bool) -> Option<u32> {
        self.budget.as_mut()?.next(self.scanner.is_reasoning(), is_whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(format: ReasoningFormat, screen: Screen, parts: &[(TextKind, &str)]) -> String {
        let mut view = View { format, screen, wrap: Wrap::default(), last: None };
        let deltas = parts.iter().map(|&(part, text)| Delta { part, text: text.into() });
        deltas.map(|delta| view.text(&delta)).collect()
    }

    const PARTS: [(TextKind, &str); 5] = [
        (TextKind::Marker, "<think>"),
        (TextKind::Reasoning, "a"),
        (TextKind::Reasoning, "b"),
        (TextKind::Marker, "</think>\n"),
        (TextKind::Content, "c"),
    ];

    #[test]
    fn reasoning_is_dim_on_a_terminal_and_absent_from_a_pipe() {
        let shown = |screen| shown(ReasoningFormat::Apart, screen, &PARTS);
        assert_eq!(shown(Screen::Styled), "\x1b[2ma\x1b[22m\x1b[2mb\x1b[22m\n\nc");
        assert_eq!(shown(Screen::Plain), "[thinking]\nab\n[answer]\nc");
        assert_eq!(shown(Screen::Pipe), "c");
    }

    #[test]
    fn an_answer_without_reasoning_is_written_as_it_is() {
        let parts = [(TextKind::Marker, "<|channel|>final<|message|>"), (TextKind::Content, "c")];
        for screen in [Screen::Styled, Screen::Plain, Screen::Pipe] {
            assert_eq!(shown(ReasoningFormat::Apart, screen, &parts), "c");
        }
    }

    #[test]
    fn messages_of_reasoning_are_lines_of_their_own() {
        let parts = [PARTS[1], PARTS[3], PARTS[2], PARTS[3], PARTS[4]];
        let got = shown(ReasoningFormat::Apart, Screen::Plain, &parts);
        assert_eq!(got, "[thinking]\na\nb\n[answer]\nc");
    }

    #[test]
    fn raw_formats_write_all() {
        let all = "<think>ab</think>\nc";
        for format in [ReasoningFormat::None, ReasoningFormat::Legacy] {
            assert_eq!(shown(format, Screen::Pipe, &PARTS), all);
            assert_eq!(shown(format, Screen::Plain, &PARTS), all);
        }
        assert_eq!(shown(ReasoningFormat::None, Screen::Styled, &PARTS), all);
        let legacy = shown(ReasoningFormat::Legacy, Screen::Styled, &PARTS);
        assert!(legacy.starts_with("\x1b[2m<think>\x1b[22m") && legacy.ends_with("\x1b[22mc"));
    }
}
