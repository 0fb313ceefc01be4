//! Prompts: chats by the model's template, and plain text, to tokens.

use std::collections::HashMap;
use std::sync::{Mutex, Once, PoisonError};

use serde_json::{Map, Value};

use super::errors::{ApiError, ApiResult};
use super::request::Chat;
use crate::Result;
use crate::chat::reasoning::{Format, Think};
use crate::chat::tools::{ToolSupport, Tools, prepare_messages};
use crate::chat::{ChatTemplate, ControlTexts, Rendered, encode_chat};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// A prompt as tokens, and as the text that a template made.
#[derive(Debug, Default)]
pub struct Encoded {
    pub tokens: Vec<u32>,
    pub text: String,
}

/// The model's chat template and what is known of it.
pub struct Templates {
    template: ChatTemplate,
    format: Option<&'static Format>,
    /// How the model is told of tools and calls them.
    pub tools: ToolSupport,
    controls: ControlTexts,
    /// Texts of control tokens in messages become control tokens.
    trusts_content: bool,
    /// Variables that the command line sets.
    variables: Map<String, Value>,
    /// Variables by what a request asks of thinking: finding them out renders the template.
    thinking: Mutex<HashMap<u8, Map<String, Value>>>,
    /// Whether the log says that messages are joined.
    told_of_joins: Once,
}

impl Templates {
    pub fn new(
        template: ChatTemplate,
        variables: Map<String, Value>,
        trusts_content: bool,
        tokenizer: &Tokenizer,
    ) -> Result<Templates> {
        let (format, tools) = (template.reasoning(), template.tool_support());
        let controls = match trusts_content {
            true => ControlTexts::default(),
            false => ControlTexts::new(tokenizer)?,
        };
        Ok(Templates {
            template,
            format,
            tools,
            controls,
            trusts_content,
            variables,
            thinking: Mutex::default(),
            told_of_joins: Once::new(),
        })
    }

    /// How the model marks its reasoning, if it does.
    pub fn reasoning(&self) -> Option<&'static Format> {
        self.format
    }

    /// The text of the prompt of a chat's next answer.
    pub fn render(&self, chat: &Chat) -> ApiResult<String> {
        let (prompt, begun) = self.render_parts(chat).map_err(|e| ApiError::of_request(&e))?;
        Ok(prompt.text + &begun)
    }

    /// The prompt, and the text of an assistant's message that the answer goes on with.
    fn render_parts(&self, chat: &Chat) -> Result<(Rendered, String)> {
        let mut variables = self.variables.clone();
        if let Some(think) = chat.think {
            variables.extend(self.thinking(think)?);
        }
        if let (Some(0), None) = (chat.reasoning_budget, chat.think) {
            variables.extend(self.thinking(Think::Off)?);
        }
        if let Some(n) = chat.reasoning_budget {
            variables.extend(self.template.thinking_budget(n)?);
        }
        variables.extend(chat.variables.clone());
        let (begun, messages) = match chat.messages.split_last() {
            Some((last, others)) if chat.continues => (text_of(last), others),
            _ => (String::new(), chat.messages.as_slice()),
        };
        let rendered = self.render_messages(messages, &chat.tools, !chat.ends_bare, &variables);
        Ok((rendered?, begun))
    }

    /// The prompt of messages. Where the template refuses them, it gets them again as more
    /// templates take them: with a system message behind others as the user's, then with
    /// neighbours of one role as one message.
    fn render_messages(
        &self,
        messages: &[Value],
        tools: &Tools,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<Rendered> {
        let (template, controls) = (&self.template, &self.controls);
        let declared = self.tools.declared(tools);
        let mut all = self.template.extras(declared.as_ref());
        all.extend(variables.clone());
        let variables = &all;
        let render = |mut messages: Vec<Value>| {
            prepare_messages(&mut messages, tools, &self.tools);
            let messages = Value::Array(messages);
            let (tools, asks) = (declared.as_ref(), add_generation_prompt);
            template.render_contents(controls, &messages, tools, asks, variables)
        };
        let first = render(messages.to_vec());
        let Err(why) = &first else { return first };
        let others = later_systems_as_users(messages);
        if let Some(Ok(prompt)) = others.clone().map(render) {
            log::warn!("a later system message becomes the user's: {why}");
            return Ok(prompt);
        }
        if let Some(Ok(prompt)) = joined(others.as_deref().unwrap_or(messages)).map(render) {
            self.told_of_joins.call_once(|| {
                log::warn!("messages of one role that follow each other become one: {why}");
            });
            return Ok(prompt);
        }
        first
    }

    fn thinking(&self, think: Think) -> Result<Map<String, Value>> {
        let key = think as u8;
        let known = || self.thinking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(variables) = known().get(&key) {
            return Ok(variables.clone());
        }
        let variables = self.template.thinking(think)?.unwrap_or_default().variables;
        known().insert(key, variables.clone());
        Ok(variables)
    }

    pub fn encode(&self, tokenizer: &Tokenizer, chat: &Chat, room: Room) -> ApiResult<Encoded> {
        let (mut prompt, begun) = self.render_parts(chat).map_err(|e| ApiError::of_request(&e))?;
        room.check(&prompt.text)?;
        room.check(&begun)?;
        let mut own = Vec::new();
        if !self.trusts_content && has_control(tokenizer, &begun) {
            own = tokenizer.encode(&begun, EncodeOptions::TEXT);
        } else {
            prompt.text.push_str(&begun);
        }
        let mut tokens = encode_chat(tokenizer, &prompt);
        tokens.extend(own);
        Ok(Encoded { tokens, text: prompt.text })
    }
}

/// Whether a text that no template has made has texts of control tokens.
fn has_control(tokenizer: &Tokenizer, text: &str) -> bool {
    let options = EncodeOptions { add_special: false, parse_special: true };
    tokenizer.encode(text, options).iter().any(|id| tokenizer.is_special(*id))
}

/// The messages with the system's, but for the first of all, as the user's. They are one with the
/// user's own around them, since templates that refuse the former often want turns to alternate.
/// `None`: there are none.
fn later_systems_as_users(messages: &[Value]) -> Option<Vec<Value>> {
    let is_later = |i: usize, message: &Value| i > 0 && message["role"] == "system";
    messages.iter().enumerate().find(|(i, message)| is_later(*i, message))?;
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    let mut was_later = false;
    for (i, message) in messages.iter().enumerate() {
        let is_later = is_later(i, message);
        let mut message = message.clone();
        if is_later {
            message["role"] = "user".into();
        }
        match out.last_mut() {
            Some(last)
                if (is_later || was_later)
                    && last["role"] == "user"
                    && message["role"] == "user" =>
            {
                join(last, &message);
            }
            _ => out.push(message),
        }
        was_later = is_later;
    }
    Some(out)
}

/// The messages with neighbours of one role as one. Results of tools stay apart, and so does what
/// follows a call. `None`: there are none.
fn joined(messages: &[Value]) -> Option<Vec<Value>> {
    let is_open = |message: &Value| message["role"] != "tool" && message["tool_calls"].is_null();
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages {
        match out.last_mut() {
            Some(last) if is_open(last) && last["role"] == message["role"] => join(last, message),
            _ => out.push(message.clone()),
        }
    }
    (out.len() < messages.len()).then_some(out)
}

/// Adds a message to the one before, with a blank line between their texts.
fn join(before: &mut Value, message: &Value) {
    let mut texts = vec![text_of(before), text_of(message)];
    texts.retain(|text| !text.is_empty());
    before["content"] = texts.join("\n\n").into();
    if let (Some(all), Some(more)) = (before.as_object_mut(), message.as_object()) {
        for (name, value) in more {
            all.entry(name.clone()).or_insert_with(|| value.clone());
        }
    }
}

/// The text of a message, of its parts if it has some.
fn text_of(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

/// The tokens of a text that no template has made.
pub fn plain(tokenizer: &Tokenizer, text: &str, room: Room) -> ApiResult<Encoded> {
    room.check(text)?;
    let tokens = tokenizer.encode(text, EncodeOptions::PROMPT);
    Ok(Encoded { tokens, text: String::new() })
}

/// Room for a prompt.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub n_ctx: usize,
    /// Bytes of the longest token.
    pub longest_piece: usize,
}

impl Room {
    /// Refuses a text that cannot fit whatever its tokens are, before it is tokenized.
    fn check(self, text: &str) -> ApiResult<()> {
        let least = text.len() / self.longest_piece.max(1);
        match least > self.n_ctx {
            true => Err(ApiError::context_overflow(least, self.n_ctx)),
            false => Ok(()),
        }
    }
}

/// Bytes of the longest token.
pub fn longest_piece(tokenizer: &Tokenizer) -> usize {
    let ids = 0..tokenizer.n_vocab() as u32;
    ids.filter_map(|id| tokenizer.piece(id).ok()).map(<[u8]>::len).max().unwrap_or(1)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::tokenizer::{TokenType, Vocab, VocabModel, byte_level_text};
    use serde_json::json;

    fn message(role: &str, text: &str) -> Value {
        json!({ "role": role, "content": text })
    }

    /// The end token, and a control token.
    const END: &str = "<end>";
    pub const CALL: &str = "<call>";

    /// All bytes and both of them.
    pub fn tokenizer() -> Tokenizer {
        let mut tokens: Vec<Vec<u8>> =
            (0..=255u8).map(|byte| byte_level_text(&[byte]).into()).collect();
        let mut types = vec![TokenType::Normal; tokens.len()];
        tokens.extend([END, CALL].map(|name| name.as_bytes().to_vec()));
        types.resize(tokens.len(), TokenType::Control);
        let mut vocab = Vocab::new(VocabModel::Bpe, tokens);
        vocab.ids.eos = Some(256);
        (vocab.types, vocab.pre) = (types, Some("gpt-2".into()));
        Tokenizer::new(vocab).unwrap()
    }

    fn templates(source: &str, trusts_content: bool) -> (Templates, Tokenizer) {
        let tokenizer = tokenizer();
        let template = ChatTemplate::new(source, "", "").unwrap();
        (Templates::new(template, Map::new(), trusts_content, &tokenizer).unwrap(), tokenizer)
    }

    /// Turns of user and assistant alternate, as in Gemma's, Mistral's and Llama 2's templates.
    const ALTERNATING: &str = "{% for m in messages %}\
        {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}\
        [{{ m.role }}] {{ m.content }}{% endfor %}";

    #[test]
    fn turns_alternate_where_the_template_wants_it() {
        let (templates, _) = templates(ALTERNATING, false);
        let render = |messages: &[Value]| {
            let chat = Chat { messages: messages.to_vec(), ..Chat::default() };
            templates.render(&chat).map_err(|e| e.message)
        };
        let (a, b, c) = (message("user", "a"), message("user", "b"), message("assistant", "c"));
        let all = [a.clone(), b.clone(), c.clone(), c.clone(), message("system", "d"), a.clone()];
        let expected = "[user] a\n\nb[assistant] c\n\nc[user] d\n\na";
        assert_eq!(render(&all).as_deref(), Ok(expected));
        assert_eq!(
            render(&[a.clone(), c.clone(), b]).as_deref(),
            Ok("[user] a[assistant] c[user] b")
        );
        // Nothing makes these alternate.
        assert!(render(&[c.clone(), a.clone()]).unwrap_err().contains("must alternate"));
        let call = json!({ "role": "assistant", "content": "", "tool_calls": [{ "id": "1" }] });
        let result = json!({ "role": "tool", "content": "x", "tool_call_id": "1" });
        assert_eq!(joined(&[a, call, c.clone(), c, result.clone(), result]).unwrap().len(), 5);
    }

    #[test]
    fn templates_see_what_llama_cpp_gives() {
        const SOURCE: &str = "{{ '\\n' + functions }} {{ datetime | length }} {{ date_string[2] }}\
            {% for m in messages %}{{ m.content }}{% endfor %}";
        let (templates, _) = templates(SOURCE, false);
        let chat = Chat { messages: vec![message("user", "a")], ..Chat::default() };
        assert_eq!(templates.render(&chat).as_deref(), Ok("\n[] 11  a"));
        let bare = Chat { ends_bare: true, ..chat.clone() };
        let (templates, _) = self::templates("a{% if add_generation_prompt %}b{% endif %}", false);
        let rendered = [&chat, &bare].map(|chat| templates.render(chat).unwrap());
        assert_eq!(rendered, ["ab", "a"]);
    }

    #[test]
    fn contents_become_control_tokens_only_where_they_are_trusted() {
        const SOURCE: &str = "{% for m in messages %}{{ m.content }}<end>{% endfor %}";
        for trusts_content in [false, true] {
            let (templates, tokenizer) = templates(SOURCE, trusts_content);
            let n_controls = |continues: bool| {
                let messages = vec![message("user", "a<end>"), message("assistant", "b<end>")];
                let chat = Chat { messages, continues, ..Chat::default() };
                let room = Room { n_ctx: 99, longest_piece: 5 };
                let tokens = templates.encode(&tokenizer, &chat, room).unwrap().tokens;
                tokens.iter().filter(|id| **id == 256).count()
            };
            // One of the template's for each message, and one for each text.
            let expected = if trusts_content { (4, 3) } else { (2, 1) };
            assert_eq!((n_controls(false), n_controls(true)), expected);
        }
    }

    #[test]
    fn later_system_messages_become_the_users() {
        let parts = json!({ "role": "user", "content": [{ "type": "text", "text": "e" }] });
        let messages = [
            message("system", "a"),
            message("user", "b"),
            message("assistant", "c"),
            message("system", "d"),
            parts,
            message("user", "f"),
            message("assistant", "g"),
            message("system", "h"),
            message("assistant", "i"),
        ];
        let expected = [
            message("system", "a"),
            message("user", "b"),
            message("assistant", "c"),
            message("user", "d\n\ne"),
            message("user", "f"),
            message("assistant", "g"),
            message("user", "h"),
            message("assistant", "i"),
        ];
        assert_eq!(later_systems_as_users(&messages).unwrap(), expected);
        assert_eq!(later_systems_as_users(&messages[..3]), None);
    }
}
