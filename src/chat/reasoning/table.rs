//! How model families mark their reasoning. A family's row is chosen by texts that its templates
//! contain, and proven by a message that the template renders.

/// One family's way.
#[derive(Debug)]
pub struct Format {
    pub name: &'static str,
    /// All of these are in the source of a template of this family.
    pub(super) signs: &'static [&'static str],
    pub(super) shape: Shape,
    /// Ends reasoning and begins the answer, as the model itself would write it.
    pub end: &'static str,
}

#[derive(Debug)]
pub(super) enum Shape {
    /// One block in front of the answer; white space around both is no part of them.
    Block {
        open: &'static str,
        close: &'static str,
        /// Markers that may enclose the answer.
        answer: Option<(&'static str, &'static str)>,
    },
    /// Messages with a header each, which names the channel.
    Channels(Channels),
}

#[derive(Debug)]
pub(super) struct Channels {
    pub start: &'static str,
    pub channel: &'static str,
    /// Ends the header.
    pub message: &'static str,
    /// These end a message.
    pub ends: &'static [&'static str],
    /// The channel of reasoning.
    pub reasoning: &'static str,
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

const fn block(
    name: &'static str,
    signs: &'static [&'static str],
    open: &'static str,
    close: &'static str,
    end: &'static str,
) -> Format {
    Format { name, signs, shape: Shape::Block { open, close, answer: None }, end }
}

const fn enclosed(
    name: &'static str,
    signs: &'static [&'static str],
    answer: (&'static str, &'static str),
    end: &'static str,
) -> Format {
    let shape = Shape::Block { open: "<think>", close: "</think>", answer: Some(answer) };
    Format { name, signs, shape, end }
}

/// The more particular ones come first.
pub(super) const FORMATS: &[Format] = &[
    Format {
        name: "harmony",
        signs: &["<|channel|>analysis<|message|>", "<|start|>assistant"],
        shape: Shape::Channels(Channels {
            start: "<|start|>",
            channel: "<|channel|>",
            message: "<|message|>",
            ends: &["<|end|>", "<|return|>", "<|call|>"],
            reasoning: "analysis",
        }),
        end: "<|end|><|start|>assistant<|channel|>final<|message|>",
    },
    block(
        "seed",
        &["<seed:think>", "</seed:think>"],
        "<seed:think>",
        "</seed:think>",
        "</seed:think>",
    ),
    block(
        "minimax-m3",
        &["<mm:think>", "</mm:think>"],
        "<mm:think>",
        "</mm:think>",
        "</mm:think>\n\n",
    ),
    block(
        "longcat",
        &["<longcat_think>", "</longcat_think>"],
        "<longcat_think>",
        "</longcat_think>",
        "</longcat_think>\n",
    ),
    block(
        "gemma",
        &["<|channel>", "<channel|>"],
        "<|channel>thought",
        "<channel|>",
        "\n<channel|>",
    ),
    Format {
        name: "command",
        signs: &["<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"],
        shape: Shape::Block {
            open: "<|START_THINKING|>",
            close: "<|END_THINKING|>",
            answer: Some(("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
        },
        end: "<|END_THINKING|><|START_RESPONSE|>",
    },
    Format {
        name: "command-text",
        signs: &["<|START_THINKING|>", "<|END_THINKING|>"],
        shape: Shape::Block {
            open: "<|START_THINKING|>",
            close: "<|END_THINKING|>",
            answer: Some(("<|START_TEXT|>", "<|END_TEXT|>")),
        },
        end: "<|END_THINKING|><|START_TEXT|>",
    },
    block(
        "apertus",
        &["<|inner_prefix|>", "<|inner_suffix|>"],
        "<|inner_prefix|>",
        "<|inner_suffix|>",
        "<|inner_suffix|>",
    ),
    block("mistral", &["[THINK]", "[/THINK]"], "[THINK]", "[/THINK]", "[/THINK]"),
    block(
        "apriel",
        &["Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"],
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        "\n[BEGIN FINAL RESPONSE]\n",
    ),
    block(
        "granite",
        &["Here is my thought process:", "Here is my response:"],
        "Here is my thought process:",
        "Here is my response:",
        "\n\nHere is my response:\n\n",
    ),
    block("kimi-vl", &["◁think▷", "◁/think▷"], "◁think▷", "◁/think▷", "◁/think▷"),
    block("exaone", &["<thought>", "</thought>"], "<thought>", "</thought>", "\n</thought>\n\n"),
    // ERNIE, Granite 3.3
    enclosed(
        "think-response",
        &["<think>", "</think>", "<response>", "</response>"],
        ("<response>", "</response>"),
        "\n</think>\n\n<response>\n",
    ),
    // Hunyuan
    enclosed(
        "think-answer",
        &["<think>", "</think>", "<answer>"],
        ("<answer>", "</answer>"),
        "\n</think>\n<answer>\n",
    ),
    // DeepSeek, Qwen, GLM, MiniMax, Kimi K2, Nemotron, Ling, LFM, Step, Phi, Olmo, …
    // Some templates only open the block, others only take it out of earlier answers.
    block("think", &["think>"], "<think>", "</think>", "\n</think>\n\n"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_begins_after_its_reasoning() {
        let format = |name| FORMATS.iter().find(|format| format.name == name).unwrap();
        let start = |marker, open| Some(AnswerStart { marker, open });
        let think = format("think");
        assert_eq!(think.answer_start("<|assistant|>"), start("</think>", Some("<think>")));
        assert_eq!(think.answer_start("<|assistant|><think>\n"), start("</think>", None));
        assert_eq!(think.answer_start("<think>\n\n</think>\n\n"), None);
        let enclosed = format("think-answer");
        assert_eq!(enclosed.answer_start(""), start("<answer>", Some("<think>")));
        let end = "<|channel|>final<|message|>";
        assert_eq!(format("harmony").answer_start("<|start|>assistant"), start(end, None));
        for format in FORMATS {
            let AnswerStart { marker, .. } = format.answer_start("").unwrap();
            assert!(format.end.trim_end().ends_with(marker), "{}", format.name);
        }
    }

    /// The scanner decides by the first marker that it sees: none may hide in another, nor begin
    /// within one's end.
    #[test]
    fn markers_do_not_overlap() {
        for format in FORMATS {
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
