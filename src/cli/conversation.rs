//! Messages and the prompt that the model's template makes of them.

use crate::Result;
use crate::chat::{self, ChatTemplate};
use crate::engine::Engine;
use crate::gguf::Gguf;
use crate::tokenizer::EncodeOptions;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Whether the file brings a chat template: what decides between a chat and plain text.
pub fn has_template(gguf: &Gguf) -> bool {
    chat::names(gguf).iter().any(|name| name == "default")
}

pub struct Conversation {
    engine: Arc<Engine>,
    template: ChatTemplate,
    system: Option<String>,
    /// User and assistant in turn, as the template wants them.
    messages: Vec<Value>,
}

impl Conversation {
    pub fn new(engine: &Arc<Engine>, template: Option<&str>) -> Result<Self> {
        let template = ChatTemplate::from_gguf(engine.gguf(), engine.tokenizer(), template)?;
        Ok(Self { engine: engine.clone(), template, system: None, messages: Vec::new() })
    }

    pub fn set_system(&mut self, text: &str) {
        self.system = (!text.is_empty()).then(|| text.to_owned());
    }

    pub fn add_user(&mut self, text: &str) {
        self.messages.push(json!({ "role": "user", "content": text }));
    }

    pub fn add_assistant(&mut self, text: &str) {
        self.messages.push(json!({ "role": "assistant", "content": text }));
    }

    /// Forgets everything but what the system says.
    pub fn clear(&mut self) {
        self.messages.clear();
    }

    /// Takes back the last message if it is this role's.
    pub fn take_back(&mut self, role: &str) -> bool {
        let found = self.messages.last().is_some_and(|message| message["role"] == role);
        if found {
            self.messages.pop();
        }
        found
    }

    /// The prompt for the next answer.
    pub fn tokens(&self) -> Result<Vec<u32>> {
        let system = self.system.iter().map(|s| json!({ "role": "system", "content": s }));
        let messages: Vec<Value> = system.chain(self.messages.iter().cloned()).collect();
        let text = self.template.render(&Value::Array(messages), None, true, &Map::new())?;
        let tokenizer = self.engine.tokenizer();
        // A template that writes BOS itself must not lead to two of them.
        let bos = tokenizer.special_text(tokenizer.bos());
        let add_special = bos.is_empty() || !text.starts_with(&bos);
        Ok(tokenizer.encode(&text, EncodeOptions { add_special, parse_special: true }))
    }
}
