//! How model families mark their reasoning: the rows of `models/chat/reasoning.toml`, which says
//! what the fields mean.

use std::sync::LazyLock;

use serde::Deserialize;

use crate::chat::data::{Text, Texts, pair, table, text, texts};

/// One family's way.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Format {
    #[serde(deserialize_with = "text")]
    pub name: Text,
    /// All of these are in the source of a template of this family.
    #[serde(deserialize_with = "texts")]
    pub(super) signs: Texts,
    pub(super) shape: Shape,
    /// Ends reasoning and begins the answer, as the model itself would write it.
    #[serde(deserialize_with = "text")]
    pub end: Text,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum Shape {
    /// One block in front of the answer; white space around both is no part of them.
    Block {
        #[serde(deserialize_with = "text")]
        open: Text,
        #[serde(deserialize_with = "text")]
        close: Text,
        /// Markers that may enclose the answer.
        #[serde(default, deserialize_with = "pair")]
        answer: Option<(Text, Text)>,
    },
    /// Messages with a header each, which names the channel.
    Channels(Channels),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Channels {
    #[serde(deserialize_with = "text")]
    pub start: Text,
    #[serde(deserialize_with = "text")]
    pub channel: Text,
    /// Ends the header.
    #[serde(deserialize_with = "text")]
    pub message: Text,
    /// These end a message.
    #[serde(deserialize_with = "texts")]
    pub ends: Texts,
    /// The channel of reasoning.
    #[serde(deserialize_with = "text")]
    pub reasoning: Text,
}

/// The beginning of an answer in a model's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerStart {
    /// Ends what stands before the answer.
    pub marker: &'static str,
    /// Opens reasoning, where the answer may also come without any.
    pub open: Option<&'static str>,
}

impl Format {
    /// The beginning of the answer to `prompt`, which may have opened the reasoning already.
    /// `None`: right behind the prompt.
    pub fn answer_start(&self, prompt: &str) -> Option<AnswerStart> {
        let ends_with = |marker: &str| prompt.trim_end().ends_with(marker);
        let (marker, open) = match &self.shape {
            Shape::Block { open, close, answer } => {
                let marker = answer.map_or(*close, |(begin, _)| begin);
                (marker, (!ends_with(open)).then_some(*open))
            }
            Shape::Channels(c) => {
                let header = self.end.rfind(c.channel).unwrap_or_default();
                (&self.end[header..], None)
            }
        };
        let is_behind = ends_with(marker);
        (!is_behind).then_some(AnswerStart { marker, open })
    }

    /// All texts that are neither reasoning nor answer.
    pub(super) fn markers(&self) -> Vec<&'static str> {
        match &self.shape {
            Shape::Block { open, close, answer } => {
                let (begin, end) = answer.unzip();
                [Some(*open), Some(*close), begin, end].into_iter().flatten().collect()
            }
            Shape::Channels(c) => {
                [c.start, c.channel, c.message].iter().chain(c.ends).copied().collect()
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    format: Vec<Format>,
}

static TABLE: LazyLock<Table> =
    LazyLock::new(|| table(include_str!("../../../models/chat/reasoning.toml")));

/// All families' formats; the more particular ones come first.
pub(super) fn formats() -> &'static [Format] {
    &TABLE.format
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_begins_after_its_reasoning() {
        let format = |name| formats().iter().find(|format| format.name == name).unwrap();
        let start = |marker, open| Some(AnswerStart { marker, open });
        let think = format("think");
        assert_eq!(think.answer_start("<|assistant|>"), start("</think>", Some("<think>")));
        assert_eq!(think.answer_start("<|assistant|><think>\n"), start("</think>", None));
        assert_eq!(think.answer_start("<think>\n\n</think>\n\n"), None);
        let enclosed = format("think-answer");
        assert_eq!(enclosed.answer_start(""), start("<answer>", Some("<think>")));
        let end = "<|channel|>final<|message|>";
        assert_eq!(format("harmony").answer_start("<|start|>assistant"), start(end, None));
        for format in formats() {
            let AnswerStart { marker, .. } = format.answer_start("").unwrap();
            assert!(format.end.trim_end().ends_with(marker), "{}", format.name);
        }
    }

    /// The scanner decides by the first marker that it sees: none may hide in another, nor begin
    /// within one's end.
    #[test]
    fn markers_do_not_overlap() {
        for format in formats() {
            let markers = format.markers();
            for (i, a) in markers.iter().enumerate() {
                assert!(!a.is_empty() && a.trim() == *a, "{}: {a:?}", format.name);
                for (j, b) in markers.iter().enumerate().filter(|(j, _)| i != *j) {
                    assert!(!a.contains(b), "{} {i} {j}", format.name);
                    let begins = |n: &usize| a.is_char_boundary(*n) && b.starts_with(&a[*n..]);
                    assert!(!(1..a.len()).any(|n| begins(&n)), "{}: {a} {b}", format.name);
                }
            }
        }
    }
}
