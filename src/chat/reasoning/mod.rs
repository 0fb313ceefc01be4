//! Reasoning: what a model writes before its answer. Families mark it in their own ways (`table`);
//! a model's text is parted as it comes (`scanner`), ended after so many tokens (`budget`), and
//! switched on and off by variables of the template (`switches`).

mod budget;
mod scanner;
mod switches;
mod table;

pub use budget::Budget;
pub use scanner::{ChatAnswer, Delta, Scanner, TextKind};
pub(super) use scanner::{is_marker, undecided};
pub use switches::{Setting, Think};
pub use table::{AnswerStart, Format};

use super::ChatTemplate;
use crate::tokenizer::{EncodeOptions, TokenType, Tokenizer};
use serde_json::{Map, json};
use table::{Shape, formats};

/// The texts of the self-check.
const REASONING: &str = "Seven is odd.";
const ANSWER: &str = "It is odd.";

/// Text with control tokens in it.
const MARKED: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };

impl ChatTemplate {
    /// How the model that this template belongs to marks its reasoning; `None` if it has none.
    pub fn reasoning(&self) -> Option<&'static Format> {
        let signed = |format: &&Format| format.signs.iter().all(|sign| self.source.contains(sign));
        let format = formats().iter().filter(signed).find(|format| self.proves(format));
        log::debug!("reasoning: {}", format.map_or("not recognised", |format| format.name));
        format
    }

    /// Whether a message with reasoning, rendered by the template, is parted again as it was.
    /// Nothing speaks against a format if the template does not render reasoning.
    fn proves(&self, format: &'static Format) -> bool {
        let messages = json!([
            { "role": "user", "content": "Is seven odd?" },
            { "role": "assistant", "content": ANSWER, "reasoning_content": REASONING },
        ]);
        let Ok(text) = self.render(&messages, None, false, &Map::new()) else { return true };
        let Some(at) = text.find(REASONING) else { return true };
        let open = match &format.shape {
            Shape::Block { open, .. } => *open,
            Shape::Channels(channels) => channels.channel,
        };
        // Where only the prompt of an answer opens the reasoning, earlier ones lack its beginning.
        let (start, prompt) = text[..at].rfind(open).map_or((at, open), |start| (start, ""));
        let mut scanner = Scanner::new(Some(format), prompt);
        let mut deltas = scanner.push(&text[start..]);
        deltas.extend(scanner.finish());
        let mut answer = ChatAnswer::default();
        deltas.iter().for_each(|delta| answer.add(delta));
        answer.reasoning == REASONING && answer.content.starts_with(ANSWER)
    }
}

impl Format {
    /// Control tokens of the markers: they must be in the text that a scanner gets.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        control_tokens(&self.markers(), tokenizer)
    }

    /// Tokens that end the reasoning where a grammar says what begins behind it.
    pub fn end_tokens_before_grammar(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let end = match &self.shape {
            Shape::Channels(channels) => {
                self.end.split(channels.channel).next().unwrap_or(self.end)
            }
            Shape::Block { .. } => self.end,
        };
        tokenizer.encode(end, MARKED)
    }

    /// Tokens that end the reasoning and begin the answer, after `message`.
    pub fn end_tokens(&self, tokenizer: &Tokenizer, message: &str) -> Vec<u32> {
        tokenizer.encode(&format!("{message}{}", self.end), MARKED)
    }
}

/// Control tokens in texts that a model may write.
pub(super) fn control_tokens(texts: &[&str], tokenizer: &Tokenizer) -> Vec<u32> {
    let ids = texts.iter().flat_map(|text| tokenizer.encode(text, MARKED)).collect::<Vec<_>>();
    let is_control = |id| matches!(tokenizer.token_type(id), Ok(TokenType::Control));
    ids.into_iter().filter(|&id| is_control(id)).collect()
}
