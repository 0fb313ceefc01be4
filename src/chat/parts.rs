//! OpenAI's content parts, `"content": [{"type": "text", "text": "…"}]`, for templates that read
//! text alone.

use serde_json::Value;

/// The texts of a message's parts; `None` unless its content is a list of nothing but text parts.
fn texts(message: &Value) -> Option<Vec<&str>> {
    message.get("content")?.as_array()?.iter().map(text).collect()
}

fn text(part: &Value) -> Option<&str> {
    (part.get("type")?.as_str()? == "text").then_some(part.get("text")?.as_str()?)
}

/// The messages with the parts of each joined to one text, a line break between them, as llama.cpp
/// joins them; `None` where no message has parts.
pub fn joined(messages: &[Value]) -> Option<Vec<Value>> {
    if messages.iter().all(|message| texts(message).is_none()) {
        return None;
    }
    let join = |message: &Value| {
        let mut message = message.clone();
        if let Some(text) = texts(&message).map(|texts| texts.join("\n")) {
            message["content"] = text.into();
        }
        message
    };
    Some(messages.iter().map(join).collect())
}

/// Whether a template that was given the lists has read them: each text is in the prompt, and no
/// list is, printed as one.
pub fn are_read(prompt: &str, messages: &[Value]) -> bool {
    let is_printed = ["{'type': 'text'", "{\"type\": \"text\""].iter().any(|p| prompt.contains(p));
    let mut all = messages.iter().filter_map(texts).flatten();
    !is_printed && all.all(|text| prompt.contains(text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn texts_are_joined_and_all_else_stays() {
        let image = json!({"role": "user", "content": [{"type": "image_url"}]});
        let plain = json!({"role": "system", "content": "a"});
        assert_eq!(joined(&[image.clone(), plain.clone()]), None);
        let parts = json!([{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]);
        let messages = [plain.clone(), image.clone(), json!({"role": "user", "content": parts})];
        let expected = vec![plain, image, json!({"role": "user", "content": "b\nc"})];
        assert_eq!(joined(&messages), Some(expected));
    }

    #[test]
    fn lists_that_are_printed_are_not_read() {
        let messages = [json!({"content": [{"type": "text", "text": " hi "}]})];
        assert!(are_read("user: hi", &messages));
        assert!(!are_read("user: ", &messages));
        assert!(!are_read("user: [{'type': 'text', 'text': ' hi '}]", &messages));
    }
}
