//! Messages and the prompt that the model's template makes of them.

use super::new_file;
use super::prompt::read_text;
use super::reasoning::{Reasoning, Variables};
use crate::chat::reasoning::{AnswerStart, ChatAnswer, Format, Scanner};
use crate::chat::{self, ChatTemplate};
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

/// Whether the file brings a chat template: what decides between a chat and plain text.
pub fn has_template(gguf: &Gguf) -> bool {
    chat::names(gguf).iter().any(|name| name == "default")
}

pub struct Conversation {
    template: ChatTemplate,
    /// The markers of the model's reasoning, if it has any.
    format: Option<&'static Format>,
    variables: Variables,
    system: Option<String>,
    /// User and assistant in turn, as the template wants them.
    messages: Vec<Value>,
}

/// The prompt for the next answer.
pub struct Prompt {
    pub tokens: Vec<u32>,
    /// The markers of the model's reasoning, if it has any.
    pub format: Option<&'static Format>,
    /// For the answer's text.
    pub scanner: Scanner,
    /// The end of the reasoning, if there may be any.
    pub answer_start: Option<AnswerStart>,
}

impl Conversation {
    /// With one of the file's templates, or another one.
    pub fn new(gguf: &Gguf, tokenizer: &Tokenizer, template: Option<&str>) -> Result<Self> {
        Ok(Self::with_template(ChatTemplate::from_gguf(gguf, tokenizer, template)?))
    }

    fn with_template(template: ChatTemplate) -> Self {
        let format = template.reasoning();
        Self { template, format, variables: Variables::new(), system: None, messages: Vec::new() }
    }

    /// The markers of the model's reasoning, if it has any.
    pub fn format(&self) -> Option<&'static Format> {
        self.format
    }

    /// Sets the reasoning of the following answers.
    pub fn set_reasoning(&mut self, reasoning: &Reasoning) -> Result<()> {
        self.variables = reasoning.variables(&self.template)?;
        Ok(())
    }

    pub fn set_system(&mut self, text: &str) {
        self.system = (!text.is_empty()).then(|| text.to_owned());
    }

    pub fn add_user(&mut self, text: &str) {
        self.messages.push(json!({ "role": "user", "content": text }));
    }

    /// Reasoning has a field of its own: templates that want it in the prompt read it there.
    pub fn add_assistant(&mut self, answer: &ChatAnswer) {
        let mut message = json!({ "role": "assistant", "content": answer.content });
        if !answer.reasoning.is_empty() {
            message["reasoning_content"] = answer.reasoning.as_str().into();
        }
        self.messages.push(message);
    }

    /// Forgets everything but what the system says.
    pub fn clear(&mut self) {
        self.messages.clear();
    }

    /// Writes the conversation as JSON: `{"messages": [{"role", "content"}, …]}`.
    pub fn save(&self, path: &Path) -> Result<()> {
        if path.exists() {
            Self::read(path)?;
        }
        let messages: Vec<Value> = self.all().collect();
        new_file::write_text(path, &format!("{:#}\n", json!({ "messages": messages })))
    }

    /// Goes on with the conversation of such a file in place of this one.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        let (system, messages) = Self::read(path)?;
        (self.system, self.messages) = (system, messages);
        Ok(())
    }

    /// The system prompt of such a file, and its messages of user and assistant.
    fn read(path: &Path) -> Result<(Option<String>, Vec<Value>)> {
        let wrong = |got: &str| {
            let expected = "{\"messages\": [{\"role\", \"content\"}, …]}, as /save writes it";
            Error::format(path, "file", expected, got)
        };
        let text = read_text(path)?;
        let value: Value = serde_json::from_str(&text).map_err(|_| wrong("no JSON"))?;
        let messages = value["messages"].as_array().ok_or_else(|| wrong("no messages"))?;
        let mut messages = messages.clone();
        let has_text = |message: &Value| message["content"].is_string();
        let system = messages.first().is_some_and(|first| first["role"] == "system");
        let system = system.then(|| messages.remove(0));
        let is_turn = |(i, message): (usize, &Value)| {
            has_text(message) && message["role"] == ["user", "assistant"][i % 2]
        };
        if !system.iter().all(has_text) || !messages.iter().enumerate().all(is_turn) {
            return Err(wrong("other roles, or a message without text"));
        }
        if messages.len() % 2 == 1 {
            return Err(wrong("a last message without an answer"));
        }
        let system = system.and_then(|message| message["content"].as_str().map(str::to_owned));
        Ok((system, messages))
    }

    /// The system's message and all others.
    fn all(&self) -> impl Iterator<Item = Value> {
        let system = self.system.iter().map(|s| json!({ "role": "system", "content": s }));
        system.chain(self.messages.iter().cloned())
    }

    /// Lets the oldest messages leave, up to the second of the user's that is left. False if there
    /// is no other than the last.
    pub fn forget_oldest(&mut self) -> bool {
        let mut of_user = (1..self.messages.len()).filter(|i| self.messages[*i]["role"] == "user");
        let Some(next) = of_user.next() else { return false };
        self.messages.drain(..next);
        true
    }

    pub fn n_messages(&self) -> usize {
        self.messages.len()
    }

    /// Takes back the last message if it is this role's: its text.
    pub fn take_back(&mut self, role: &str) -> Option<String> {
        let message = self.messages.pop_if(|message| message["role"] == role)?;
        message["content"].as_str().map(str::to_owned)
    }

    /// The prompt for the next answer.
    pub fn prompt(&self, tokenizer: &Tokenizer) -> Result<Prompt> {
        let text = self.text()?;
        let answer_start = self.format.and_then(|format| format.answer_start(&text));
        let scanner = Scanner::new(self.format, &text);
        // The user's own texts: control tokens written out in them are meant.
        let tokens = chat::encode_chat(tokenizer, &text.into());
        Ok(Prompt { tokens, format: self.format, scanner, answer_start })
    }

    fn text(&self) -> Result<String> {
        let messages: Vec<Value> = self.all().collect();
        let mut variables = self.template.extras(None);
        variables.extend(self.variables.clone());
        self.template.render(&Value::Array(messages), None, true, &variables)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::Clock;
    use crate::tokenizer::{Detokenizer, EncodeOptions, TokenType, Vocab, VocabModel};

    const GOLDEN: &str = include_str!("../../tests/fixtures/chat/turns.json");

    fn golden() -> Value {
        serde_json::from_str(GOLDEN).unwrap()
    }

    /// A vocabulary of ASCII characters and of control tokens.
    fn tokenizer(special: &[Value]) -> Tokenizer {
        let mut tokens: Vec<Vec<u8>> = (b'!'..=b'~').map(|byte| vec![byte]).collect();
        tokens.extend(["Ġ", "Ċ"].map(|name| name.as_bytes().to_vec()));
        let mut types = vec![TokenType::Normal; tokens.len()];
        tokens.extend(special.iter().map(|name| name.as_str().unwrap().as_bytes().to_vec()));
        types.resize(tokens.len(), TokenType::Control);
        let mut vocab = Vocab::new(VocabModel::Bpe, tokens);
        (vocab.types, vocab.pre, vocab.add_bos) = (types, Some("gpt-2".into()), Some(false));
        Tokenizer::new(vocab).unwrap()
    }

    /// The answer that a conversation keeps of a model's text, of which only the first tokens
    /// arrive.
    fn answer(
        conversation: &Conversation,
        tokenizer: &Tokenizer,
        text: &str,
        n_tokens: usize,
    ) -> ChatAnswer {
        let Prompt { mut scanner, .. } = conversation.prompt(tokenizer).unwrap();
        let mut deltas = Vec::new();
        let shown = conversation.format().map_or(Vec::new(), |format| format.tokens(tokenizer));
        let mut detokenizer = Detokenizer::new(tokenizer, true).showing(&shown);
        let options = EncodeOptions { add_special: false, parse_special: true };
        for &id in tokenizer.encode(text, options).iter().take(n_tokens) {
            if tokenizer.is_eog(id) {
                break;
            }
            deltas.extend(scanner.push(detokenizer.push(id).unwrap()));
        }
        deltas.extend(scanner.finish());
        let mut answer = ChatAnswer::default();
        deltas.iter().for_each(|delta| answer.add(delta));
        answer
    }

    fn begin(case: &Value) -> (Conversation, Tokenizer) {
        let name = case["template"].as_str().unwrap();
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/chat");
        let source = std::fs::read_to_string(format!("{dir}/{name}.jinja")).unwrap();
        let token = |key: &str| case[key].as_str().unwrap_or_default();
        let clock = Clock::parse(golden()["now"].as_str().unwrap()).unwrap();
        let template =
            ChatTemplate::with_clock(&source, token("bos"), token("eos"), clock).unwrap();
        let mut conversation = Conversation::with_template(template);
        conversation.variables = case["kwargs"].as_object().unwrap().clone();
        conversation.set_system(case["system"].as_str().unwrap_or_default());
        (conversation, tokenizer(case["special"].as_array().unwrap()))
    }

    /// Conversations whose answers come token by token are rendered as transformers renders them
    /// from the messages that the model meant.
    #[test]
    fn three_turns_render_as_in_transformers() {
        let all = golden();
        let cases = all["cases"].as_array().unwrap();
        assert!(cases.len() >= 5);
        for case in cases {
            let (mut conversation, tokenizer) = begin(case);
            for (n, turn) in case["turns"].as_array().unwrap().iter().enumerate() {
                let text = |key: &str| turn[key].as_str().unwrap();
                conversation.add_user(text("user"));
                let case = format!("{} turn {n}", case["template"]);
                assert_eq!(conversation.text().unwrap(), text("prompt"), "{case}");
                let answer = answer(&conversation, &tokenizer, text("output"), usize::MAX);
                assert_eq!(answer.reasoning, text("reasoning"), "{case}");
                assert_eq!(answer.content, text("answer"), "{case}");
                conversation.add_assistant(&answer);
            }
        }
    }

    /// The next prompt goes on where the last one ended, as far as reasoning is not taken out:
    /// what was computed is used again.
    #[test]
    fn a_prompt_is_a_prefix_of_the_next() {
        for case in golden()["cases"].as_array().unwrap() {
            let prompt = |n: usize| case["turns"][n]["prompt"].as_str().unwrap();
            for n in 1..3 {
                let (before, opened) = (prompt(n - 1), ["<think>\n", "<think>\n\n</think>\n\n"]);
                let kept = opened.iter().find_map(|text| before.strip_suffix(text));
                assert!(prompt(n).starts_with(kept.unwrap_or(before)), "{}", case["template"]);
            }
        }
    }

    /// Wherever an answer is interrupted, what is kept of it is a message that renders.
    #[test]
    fn an_interrupted_answer_leaves_a_well_formed_conversation() {
        for case in golden()["cases"].as_array().unwrap() {
            let turn = &case["turns"][0];
            let text = |key: &str| turn[key].as_str().unwrap();
            for n_tokens in 0..text("output").len() {
                let (mut conversation, tokenizer) = begin(case);
                conversation.add_user(text("user"));
                let kept = answer(&conversation, &tokenizer, text("output"), n_tokens);
                assert!(text("reasoning").starts_with(&kept.reasoning), "{kept:?}");
                assert!(text("answer").starts_with(&kept.content), "{kept:?}");
                conversation.add_assistant(&kept);
                conversation.add_user("And?");
                let next = conversation.text().unwrap();
                let marks = |text: &str| text.matches("<|channel|>").count();
                assert!(next.contains("And?") && marks(&next) <= 1, "{next}");
            }
        }
    }
}
