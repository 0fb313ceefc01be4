//! Parts a model's text into reasoning and answer while it comes. However the text is cut into
//! pieces, the parts are the same: what may be the beginning of a marker is held back until it is
//! clear, because text that was passed on cannot be taken back.

use super::table::{Channels, Format, Shape};

/// A part of a model's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextKind {
    Reasoning,
    Content,
    /// Markers, headers, and the white space around them.
    Marker,
}

/// Some more text of a part. The texts of all deltas make up the model's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    pub part: TextKind,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before anything but white space.
    Start,
    /// In reasoning of which nothing but white space was seen.
    Opened,
    Reasoning,
    /// Between reasoning and the answer; true behind the marker that opens the answer.
    Gap(bool),
    /// In the answer; true if a marker encloses it.
    Content(bool),
    /// In a message's header.
    Header,
}

/// No header is as long: text without one is an answer.
const MAX_HEADER: usize = 256;

#[derive(Clone, Debug)]
pub struct Scanner {
    format: Option<&'static Format>,
    state: State,
    /// The header's beginning, where the prompt has it.
    header: String,
    held: String,
    ready: Vec<Delta>,
    /// Ends the reasoning where the model forgets to, and is part of the answer.
    interrupt: Option<&'static str>,
}

impl Scanner {
    /// For what follows `prompt`, which may have opened the reasoning already. Without a format
    /// all is content.
    pub fn new(format: Option<&'static Format>, prompt: &str) -> Self {
        let mut scanner = Self {
            format,
            state: State::Content(false),
            header: String::new(),
            held: String::new(),
            ready: Vec::new(),
            interrupt: None,
        };
        match format.map(|format| &format.shape) {
            None => {}
            Some(Shape::Block { open, .. }) => {
                let opened = prompt.trim_end().ends_with(open);
                scanner.state = if opened { State::Opened } else { State::Start };
            }
            Some(Shape::Channels(channels)) => {
                scanner.state = State::Header;
                // The message that the prompt has begun.
                let begun = prompt.rfind(channels.start).map_or("", |at| &prompt[at..]);
                scanner.push(begun);
                scanner.header = std::mem::take(&mut scanner.held);
            }
        }
        scanner
    }

    /// With a text that never is in a block of reasoning: the answer begins with it.
    pub fn interrupted_by(self, marker: &'static str) -> Self {
        Self { interrupt: Some(marker), ..self }
    }

    /// Whether what comes next is reasoning, unless a marker ends it.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Opened | State::Reasoning)
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        self.held.push_str(text);
        self.scan(false)
    }

    /// The parts that were held back, when no text follows.
    pub fn finish(&mut self) -> Vec<Delta> {
        self.scan(true)
    }

    /// Ends a text that was cut: the beginning of a marker belongs to none of the parts.
    pub fn cut(&mut self) -> Vec<Delta> {
        let markers = self.format.map_or_else(Vec::new, Format::markers);
        let begin = self.held.len() - undecided(&self.held, &markers);
        if is_marker(&self.held[begin..]) {
            self.held.truncate(begin);
        }
        self.finish()
    }

    fn scan(&mut self, last: bool) -> Vec<Delta> {
        while !self.held.is_empty() && self.step(last) {}
        std::mem::take(&mut self.ready)
    }

    /// Decides on some of what is held; false if that takes more text. `last`: none follows.
    fn step(&mut self, last: bool) -> bool {
        match self.format.map(|format| &format.shape) {
            None => {
                self.emit(TextKind::Content, self.held.len());
                true
            }
            Some(Shape::Block { open, close, answer }) => self.block(open, close, *answer, last),
            Some(Shape::Channels(channels)) => match self.state {
                State::Header => self.header(channels, last),
                _ => self.message(channels, last),
            },
        }
    }

    fn block(&mut self, open: &str, close: &str, answer: Option<(&str, &str)>, last: bool) -> bool {
        let answers = answer.map_or(Some(false), |(begin, _)| self.begins(begin, last));
        match self.state {
            State::Start => match (self.begins(open, last), answers) {
                (Some(true), _) => self.pass(open, State::Opened),
                (_, Some(true)) => self.pass(answer.unwrap_or_default().0, State::Gap(true)),
                (Some(false), Some(false)) => self.state = State::Content(false),
                _ => return false,
            },
            State::Opened | State::Gap(_) if self.leading_space() > 0 => {
                self.emit(TextKind::Marker, self.leading_space());
            }
            State::Opened => self.state = State::Reasoning,
            State::Reasoning => {
                let ends: Vec<&str> = [close].into_iter().chain(self.interrupt).collect();
                match self.until(&ends, TextKind::Reasoning, true, last) {
                    true if self.held.starts_with(close) => self.pass(close, State::Gap(false)),
                    true => self.state = State::Content(false),
                    false => return false,
                }
            }
            State::Gap(false) if answers == Some(true) => {
                self.pass(answer.unwrap_or_default().0, State::Gap(true));
            }
            State::Gap(false) if answers.is_none() => return false,
            State::Gap(enclosed) => self.state = State::Content(enclosed),
            State::Content(true) => {
                let end = answer.unwrap_or_default().1;
                match self.until(&[end], TextKind::Content, true, last) {
                    true => self.pass(end, State::Gap(false)),
                    false => return false,
                }
            }
            State::Content(false) | State::Header => self.emit(TextKind::Content, self.held.len()),
        }
        true
    }

    /// Within a message's header.
    fn header(&mut self, channels: &Channels, last: bool) -> bool {
        let end = self.held.find(channels.message).filter(|at| *at <= MAX_HEADER);
        if let Some(at) = end {
            self.header.push_str(&self.held[..at]);
            self.state = match channels.name(&self.header) == channels.reasoning {
                true => State::Reasoning,
                false => State::Content(false),
            };
            self.header.clear();
            self.emit(TextKind::Marker, at + channels.message.len());
        } else if self.held.len() > MAX_HEADER + channels.message.len() {
            // No header after all. One character is passed, so that this ends.
            self.state = State::Content(false);
            self.header.clear();
            self.emit(TextKind::Content, self.held.chars().next().map_or(0, char::len_utf8));
        } else if last {
            let is_header = [channels.start, channels.channel]
                .iter()
                .chain(channels.ends)
                .any(|marker| self.held.contains(marker));
            let part = if is_header { TextKind::Marker } else { TextKind::Content };
            self.emit(part, self.held.len());
        } else {
            return false;
        }
        true
    }

    /// Within a message.
    fn message(&mut self, channels: &Channels, last: bool) -> bool {
        let mut markers = vec![channels.start, channels.channel];
        markers.extend(channels.ends);
        let part = if self.is_reasoning() { TextKind::Reasoning } else { TextKind::Content };
        if !self.until(&markers, part, false, last) {
            return false;
        }
        // The next header begins with the marker, unless it only ends this message.
        match channels.ends.iter().find(|end| self.held.starts_with(**end)) {
            Some(end) => self.pass(end, State::Header),
            None => self.state = State::Header,
        }
        true
    }

    /// Passes on what is held up to the first of the markers, or as much as is clear. Whether there
    /// is one: then it is what is held now. `trims`: white space before it is no part of the text.
    fn until(&mut self, markers: &[&str], part: TextKind, trims: bool, last: bool) -> bool {
        let found = markers.iter().filter_map(|marker| self.held.find(marker)).min();
        let clear = match found {
            Some(at) => at,
            None if last => self.held.len(),
            None => self.held.len() - undecided(&self.held, markers),
        };
        let text = &self.held[..clear];
        let text = if trims { text.trim_end() } else { text }.len();
        self.emit(part, text);
        if found.is_some() || last {
            self.emit(TextKind::Marker, clear - text);
        }
        found.is_some()
    }

    /// Whether what is held, but for white space, begins with the marker; `None` if it may.
    fn begins(&self, marker: &str, last: bool) -> Option<bool> {
        let text = self.held.trim_start();
        let may = !last && marker.starts_with(text);
        match text.starts_with(marker) {
            false if may => None,
            begins => Some(begins),
        }
    }

    fn leading_space(&self) -> usize {
        self.held.len() - self.held.trim_start().len()
    }

    /// Passes the marker that is held, after white space perhaps.
    fn pass(&mut self, marker: &str, state: State) {
        self.emit(TextKind::Marker, self.leading_space() + marker.len());
        self.state = state;
    }

    /// Passes on the first `n` bytes of what is held.
    fn emit(&mut self, part: TextKind, n: usize) {
        if n == 0 {
            return;
        }
        let text = self.held.drain(..n);
        match self.ready.last_mut() {
            Some(delta) if delta.part == part => delta.text.extend(text),
            _ => self.ready.push(Delta { part, text: text.collect() }),
        }
    }
}

/// Whether a text that may begin a marker is one to its reader: prose may be prose.
pub(in crate::chat) fn is_marker(text: &str) -> bool {
    text.trim_start().starts_with(|c: char| !c.is_alphanumeric())
}

/// Length of the longest end of `text` that begins a marker.
pub(in crate::chat) fn undecided(text: &str, markers: &[&str]) -> usize {
    let longest = markers.iter().map(|m| m.len().saturating_sub(1)).max().unwrap_or(0);
    let first = text.len().saturating_sub(longest);
    (first..text.len())
        .filter(|&at| text.is_char_boundary(at))
        .find(|&at| markers.iter().any(|marker| marker.starts_with(&text[at..])))
        .map_or(0, |at| text.len() - at)
}

impl Channels {
    /// The channel that a header names.
    fn name<'a>(&self, header: &'a str) -> &'a str {
        let name = header.rsplit_once(self.channel).map_or("", |(_, name)| name);
        name.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default()
    }
}

/// A whole message, put together from its deltas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatAnswer {
    pub reasoning: String,
    pub content: String,
    behind_marker: bool,
}

impl ChatAnswer {
    /// Parts that a marker separates are lines of their own.
    pub fn add(&mut self, delta: &Delta) {
        let whole = match delta.part {
            TextKind::Reasoning => &mut self.reasoning,
            TextKind::Content => &mut self.content,
            TextKind::Marker => {
                self.behind_marker = true;
                return;
            }
        };
        if std::mem::take(&mut self.behind_marker) && !whole.is_empty() {
            whole.push('\n');
        }
        whole.push_str(&delta.text);
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::formats;
    use super::*;

    fn format(name: &str) -> &'static Format {
        formats().iter().find(|format| format.name == name).unwrap()
    }

    /// The deltas of a text that comes in these pieces.
    fn scan<'a>(
        format: Option<&'static Format>,
        prompt: &str,
        pieces: impl IntoIterator<Item = &'a str>,
    ) -> Vec<Delta> {
        let mut scanner = Scanner::new(format, prompt);
        let mut deltas: Vec<Delta> = pieces.into_iter().flat_map(|p| scanner.push(p)).collect();
        deltas.extend(scanner.finish());
        deltas
    }

    fn answer(deltas: &[Delta]) -> (String, String) {
        let mut answer = ChatAnswer::default();
        deltas.iter().for_each(|delta| answer.add(delta));
        (answer.reasoning, answer.content)
    }

    #[track_caller]
    fn check(name: &str, prompt: &str, text: &str, reasoning: &str, content: &str) {
        let got = answer(&scan(Some(format(name)), prompt, [text]));
        assert_eq!(got, (reasoning.into(), content.into()), "{name}: {prompt:?} {text:?}");
    }

    #[test]
    fn a_block_is_parted_from_the_answer() {
        check("think", "", "<think>\nhm, x < y\n</think>\n\nYes.\n", "hm, x < y", "Yes.\n");
        check("think", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nYes", "hm", "Yes");
        check("think", "<think>\n\n</think>\n\n", "Yes", "", "Yes");
        check("think", "", "\n <think></think> Yes", "", "Yes");
        check("seed", "", "<seed:think>hm</seed:think>Yes", "hm", "Yes");
        check("mistral", "", "[THINK]a[b][/THINK]Yes", "a[b]", "Yes");
        check("gemma", "<|turn>model\n", "<|channel>thought\nhm\n<channel|>Yes", "hm", "Yes");
        let text = "Here is my thought process:\n\nhm\n\nHere is my response:\n\nYes";
        check("granite", "", text, "hm", "Yes");
    }

    #[test]
    fn only_a_block_at_the_beginning_is_reasoning() {
        for text in ["Yes", " \n Yes <think>no</think>", "<thin", "  ", "<thinking>"] {
            check("think", "", text, "", text);
        }
        check("think", "", "<think>a</think>b <think>c</think>", "a", "b <think>c</think>");
    }

    #[test]
    fn what_is_cut_off_stays_what_it_was() {
        check("think", "", "<think>a\n</thi", "a\n</thi", "");
        check("think", "", "<think>a \n", "a", "");
        check("think", "", "<think> ", "", "");
        check("think", "", "<think>a</think>\n", "a", "");
        check("harmony", "<|start|>assistant", "<|channel|>ana", "", "");
        check("harmony", "<|start|>assistant", "<|channel|>analysis<|message|>a", "a", "");
    }

    #[test]
    fn what_encloses_the_answer_is_no_part_of_it() {
        let text = "<think>a</think>\n\n<response>\nYes <b>\n</response>\n";
        check("think-response", "", text, "a", "Yes <b>");
        check("think-response", "", "<response>Yes</response>", "", "Yes");
        check("think-response", "", "<think>a</think>b</response>", "a", "b</response>");
        check("think-answer", "", "<think>a</think><answer>b", "a", "b");
        let text = "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>";
        check("command", "", text, "a", "b");
    }

    const HARMONY: &str = "<|channel|>analysis<|message|>One <b> two.<|end|><|start|>assistant\
                           <|channel|>final<|message|>Yes.\n";

    #[test]
    fn channels_are_told_apart_by_their_headers() {
        check("harmony", "<|start|>assistant", HARMONY, "One <b> two.", "Yes.\n");
        let twice = HARMONY.replace(
            "<|start|>",
            "<|start|>assistant<|channel|>analysis\
                                     <|message|>Three.<|end|><|start|>",
        );
        check("harmony", "<|start|>assistant", &twice, "One <b> two.\nThree.", "Yes.\n");
        let call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>";
        check("harmony", "<|start|>assistant", call, "", "{}");
        let opened = "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>";
        check("harmony", opened, "analysis<|message|>a", "a", "");
        check("harmony", "<|start|>assistant<|channel|>final<|message|>", "b", "", "b");
    }

    #[test]
    fn text_without_a_header_is_an_answer() {
        check("harmony", "<|start|>assistant", "Yes", "", "Yes");
        let long = "é".repeat(MAX_HEADER);
        check("harmony", "<|start|>assistant", &long, "", &long);
        let text = format!("{long}<|end|><|start|>assistant<|channel|>analysis<|message|>a");
        check("harmony", "<|start|>assistant", &text, "a", &long);
    }

    #[test]
    fn an_answer_that_interrupts_reasoning_is_no_reasoning() {
        let mut scanner = Scanner::new(Some(format("think")), "<think>").interrupted_by("<call>");
        let mut deltas = scanner.push("hm\n<ca");
        deltas.extend(scanner.push("ll>x</think>"));
        assert_eq!(answer(&deltas), ("hm".into(), "<call>x</think>".into()));
    }

    #[test]
    fn without_a_format_all_is_content() {
        assert_eq!(answer(&scan(None, "<think>", ["<think>", " a"])).1, "<think> a");
    }

    /// Texts of markers, their parts and other characters, in an order that a seed gives.
    fn noise(format: &Format, mut seed: u64) -> String {
        let mut next = move |n: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize % n
        };
        let mut out = String::new();
        let markers = format.markers();
        for _ in 0..next(12) {
            let marker = markers[next(markers.len())];
            match next(6) {
                0..=2 => out.push_str(marker),
                3 => out.extend(marker.chars().take(next(marker.chars().count()))),
                4 => out.push_str(["\n", " ", "<", "analysis", "\n\n"][next(5)]),
                _ => out.push_str(["é漢", "a b", "final", "🙂"][next(4)]),
            }
        }
        out
    }

    /// However a text is cut into pieces, the parts are the same, and nothing is lost.
    #[test]
    fn pieces_do_not_matter() {
        for format in formats() {
            let prompts = ["", "<think>\n", "<|start|>assistant"];
            for (seed, prompt) in (0..400).zip(prompts.iter().cycle()) {
                let text = noise(format, seed);
                let whole = scan(Some(format), prompt, [text.as_str()]);
                let joined: String = whole.iter().map(|delta| delta.text.as_str()).collect();
                assert_eq!(joined, text, "{}", format.name);
                let mut ends: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
                ends.push(text.len());
                let chars = ends.windows(2).map(|w| &text[w[0]..w[1]]);
                let by_char = scan(Some(format), prompt, chars);
                assert_eq!(answer(&by_char), answer(&whole), "{} {text:?}", format.name);
                for &at in &ends {
                    let cut = scan(Some(format), prompt, [&text[..at], &text[at..]]);
                    assert_eq!(answer(&cut), answer(&whole), "{} {text:?} {at}", format.name);
                }
            }
        }
    }

    /// The end that a budget writes does end the reasoning.
    #[test]
    fn the_forced_end_begins_the_answer() {
        for format in formats() {
            let opening = match &format.shape {
                Shape::Block { open, .. } => open,
                Shape::Channels(_) => "<|channel|>analysis<|message|>",
            };
            let mut scanner = Scanner::new(Some(format), "");
            scanner.push(&format!("{opening}\nso"));
            assert!(scanner.is_reasoning(), "{}", format.name);
            scanner.push(format.end);
            assert!(!scanner.is_reasoning(), "{}", format.name);
            let text = format!("{opening}\nso{}Yes", format.end);
            let got = answer(&scan(Some(format), "", [text.as_str()]));
            let reasoning = if got.0.starts_with('\n') { "\nso" } else { "so" };
            assert_eq!(got, (reasoning.into(), "Yes".into()), "{}", format.name);
        }
    }
}
