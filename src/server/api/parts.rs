//! Parts of messages that are no text. A note stands for a picture, a recording, a file or an
//! unknown part of an earlier message or of a tool's result, so that no conversation ends with it.
//! A part that the user sends now is refused: the answer would be about something else. Plain text
//! in a document is read wherever it stands.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

use crate::server::errors::{ApiError, ApiResult};

pub const IMAGE: &str = "[an image, which this model cannot see]";
const SOUND: &str = "[a recording, which this model cannot hear]";
const FILE: &str = "[a file, which this model cannot read]";

/// The most characters of a type's name in a note.
const MAX_NAME: usize = 40;

/// The note that stands for a part of a known type.
fn note(kind: &str) -> Option<&'static str> {
    match kind {
        "image" | "image_url" | "input_image" | "computer_screenshot" => Some(IMAGE),
        "audio" | "audio_url" | "input_audio" => Some(SOUND),
        "file" | "input_file" | "document" | "video" | "video_url" => Some(FILE),
        _ => None,
    }
}

/// Whether parts of this type are pictures, recordings or files.
pub fn is_media(kind: &str) -> bool {
    note(kind).is_some()
}

/// The text of a part at `path` whose type is none of a text: a document's own, or a note. Fails
/// where the user sends the part now.
pub fn text(part: &Value, kind: &str, path: &str, is_new: bool) -> ApiResult<String> {
    match (document(part, kind), note(kind)) {
        (Some(text), _) => Ok(text),
        (None, Some(_)) if is_new => Err(ApiError::not_text(path, kind)),
        (None, Some(note)) => Ok(note.to_owned()),
        (None, None) if is_new => {
            let path = format!("{path}.type");
            let message = format!("{path}: expected text, got {kind:?}: send it as text");
            Err(ApiError::invalid(path, message))
        }
        (None, None) => {
            let kind: String = kind.chars().take(MAX_NAME).collect();
            Ok(format!("[a part of the type {kind}, which this model cannot read]"))
        }
    }
}

/// The text of a document: Anthropic's, whose source is a text or blocks of text, a file of
/// OpenAI's, or a result of a search. `None`: it is no plain text.
fn document(part: &Value, kind: &str) -> Option<String> {
    let (names, text) = match kind {
        "document" => {
            let source = &part["source"];
            let text = match source["type"].as_str()? {
                "text" => source["data"].as_str()?.to_owned(),
                "content" => blocks(&source["content"])?,
                "base64" => decoded(source["data"].as_str()?)?,
                _ => return None,
            };
            ([&part["title"], &part["context"]], text)
        }
        "search_result" => ([&part["title"], &part["source"]], blocks(&part["content"])?),
        "file" | "input_file" => {
            let file = part.get("file").unwrap_or(part);
            let text = decoded(file["file_data"].as_str()?)?;
            ([&file["filename"], &Value::Null], text)
        }
        _ => return None,
    };
    let names = names.into_iter().filter_map(Value::as_str).filter(|name| !name.is_empty());
    Some(names.chain([text.as_str()]).collect::<Vec<_>>().join("\n"))
}

/// A text, or the texts of blocks that are nothing else.
fn blocks(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(list) => {
            let texts = list.iter().map(|block| block["text"].as_str());
            Some(texts.collect::<Option<Vec<_>>>()?.join("\n"))
        }
        _ => None,
    }
}

/// The text in a data URL or its Base64, if it is plain.
fn decoded(data: &str) -> Option<String> {
    let data = match data.strip_prefix("data:") {
        Some(url) => url.split_once(";base64,")?.1,
        None => data,
    };
    let text = String::from_utf8(BASE64_STANDARD.decode(data).ok()?).ok()?;
    let is_plain = |c: char| !c.is_control() || ['\t', '\n', '\r', '\x0c'].contains(&c);
    (!text.starts_with("%PDF") && text.chars().all(is_plain)).then_some(text)
}

/// The message of these roles that the user sends now: the last one of all, but for what the
/// system adds, or the beginning of the answer. Behind the result of a tool it is a part of that:
/// agents put there what the tool has brought.
pub fn newest(roles: &[&str]) -> Option<usize> {
    let before = roles.strip_suffix(&["assistant"]).unwrap_or(roles);
    let is_said = |role: &&str| !["system", "developer"].contains(role);
    let last = before.iter().rposition(&is_said)?;
    let earlier = before[..last].iter().rfind(|role| is_said(role));
    let is_brought = earlier.is_some_and(|role| ["tool", "function"].contains(role));
    (before[last] == "user" && !is_brought).then_some(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn notes_stand_for_what_is_earlier_and_errors_for_what_is_new() {
        for (kind, expected) in [
            ("image_url", "[an image,"),
            ("input_audio", "[a recording,"),
            ("document", "[a file,"),
            ("hologram", "[a part of the type hologram,"),
        ] {
            let part = json!({ "type": kind });
            let read = |is_new| text(&part, kind, "p", is_new);
            assert!(read(false).unwrap().starts_with(expected), "{kind}");
            let error = read(true).unwrap_err();
            let param = if is_media(kind) { "p" } else { "p.type" };
            assert_eq!(error.param.as_deref(), Some(param), "{kind}");
        }
    }

    #[test]
    fn plain_text_in_documents_is_read() {
        let data = BASE64_STANDARD.encode("one\ntwo é");
        let url = format!("data:text/plain;base64,{data}");
        let text_block = json!({ "type": "text", "text": "x" });
        for (part, expected) in [
            (
                json!({ "type": "document", "title": "T", "context": null,
                    "source": { "type": "text", "media_type": "text/plain", "data": "abc" } }),
                "T\nabc",
            ),
            (
                json!({ "type": "document",
                    "source": { "type": "content", "content": [text_block, text_block] } }),
                "x\nx",
            ),
            (
                json!({ "type": "file", "file": { "filename": "a.txt", "file_data": url } }),
                "a.txt\none\ntwo é",
            ),
            (json!({ "type": "input_file", "file_data": data }), "one\ntwo é"),
            (
                json!({ "type": "search_result", "title": "T", "source": "http://x",
                    "content": [text_block] }),
                "T\nhttp://x\nx",
            ),
        ] {
            let kind = part["type"].as_str().unwrap();
            for is_new in [false, true] {
                assert_eq!(text(&part, kind, "p", is_new).unwrap(), expected, "{part}");
            }
        }
        for data in [&b"%PDF-1.7"[..], b"\xff\xd8\xff", b"a\0b"] {
            let source = json!({ "type": "base64", "data": BASE64_STANDARD.encode(data) });
            let part = json!({ "type": "document", "source": source });
            assert_eq!(text(&part, "document", "p", false).unwrap(), FILE, "{data:?}");
            assert!(text(&part, "document", "p", true).is_err(), "{data:?}");
        }
        let part = json!({ "type": "document", "source": { "type": "url", "url": "http://x" } });
        assert!(text(&part, "document", "p", true).is_err());
    }

    #[test]
    fn the_newest_message_is_the_users_last_one_without_an_answer() {
        for (roles, expected) in [
            (&["user"][..], Some(0)),
            (&["user", "assistant"], Some(0)),
            (&["user", "user", "system"], Some(1)),
            (&["user", "assistant", "tool"], None),
            (&["user", "assistant", "tool", "system", "user", "system"], None),
            (&["user", "assistant", "tool", "assistant", "user"], Some(4)),
            (&["user", "assistant", "assistant"], None),
            (&["system"], None),
            (&[], None),
        ] {
            assert_eq!(newest(roles), expected, "{roles:?}");
        }
    }
}
