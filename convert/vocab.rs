//! A vocabulary on its way from a checkpoint's tokenizer files into `tokenizer.ggml.*`.

use crate::gguf::Writer;
use crate::{Error, Result};
use std::path::Path;

/// Token types of the format; SentencePiece numbers its pieces the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum TokenType {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

#[derive(Debug)]
pub struct Vocab {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE), `llama` (SentencePiece BPE), `gemma4` (the
    /// same with ranked merges) or `t5` (SentencePiece unigram).
    pub model: &'static str,
    /// `tokenizer.ggml.pre`; empty for none.
    pub pre: String,
    pub tokens: Vec<String>,
    pub types: Vec<TokenType>,
    /// One a token for SentencePiece, else none.
    pub scores: Option<Vec<f32>>,
    pub merges: Option<Vec<String>>,
    pub add_space_prefix: Option<bool>,
    pub remove_extra_whitespaces: Option<bool>,
    /// Empty for none.
    pub charsmap: Vec<u8>,
    /// Ids of added tokens that take the whitespace before or after them along.
    pub lstrip: Vec<u32>,
    pub rstrip: Vec<u32>,
}

/// A token that a tokenizer's files list beside its model's own.
#[derive(Clone, Debug)]
pub struct AddedToken {
    pub id: usize,
    pub content: String,
    /// Control tokens are never part of plain text; the others are, and match before the model.
    pub special: bool,
    /// Whether the token takes the whitespace before or after it along.
    pub lstrip: bool,
    pub rstrip: bool,
    /// A match counts between the ends of words only.
    pub single_word: bool,
}

impl AddedToken {
    /// Neither special nor greedy for whitespace.
    pub fn plain(id: usize, content: &str) -> AddedToken {
        let content = content.to_owned();
        AddedToken { id, content, special: false, lstrip: false, rstrip: false, single_word: false }
    }
}

/// llama.cpp's scores for tokens that were added, and for rows of the embedding without a token.
pub const ADDED_SCORE: f32 = -1000.0;
const PAD_SCORE: f32 = -10_000.0;

impl Vocab {
    /// Without any token.
    pub fn new(model: &'static str, pre: impl Into<String>) -> Vocab {
        Vocab {
            model,
            pre: pre.into(),
            tokens: Vec::new(),
            types: Vec::new(),
            scores: None,
            merges: None,
            add_space_prefix: None,
            remove_extra_whitespaces: None,
            charsmap: Vec::new(),
            lstrip: Vec::new(),
            rstrip: Vec::new(),
        }
    }

    /// Without any token, with scores.
    pub fn sentencepiece(model: &'static str) -> Vocab {
        Vocab { scores: Some(Vec::new()), ..Vocab::new(model, "default") }
    }

    pub fn id(&self, token: &str) -> Option<u32> {
        self.tokens.iter().position(|t| t == token).map(|i| i as u32)
    }

    /// Puts a token at its id, with unused ones in any gap before it.
    pub fn put(&mut self, id: usize, token: &str, ty: TokenType, score: f32) {
        self.pad(id + 1);
        self.tokens[id] = token.to_owned();
        self.types[id] = ty;
        if let Some(scores) = &mut self.scores {
            scores[id] = score;
        }
    }

    /// Types as llama.cpp's converter gives them. A unigram model's own control tokens and its
    /// unknown token, which files list again, stay what they are.
    pub fn put_added(&mut self, added: &[AddedToken]) {
        for token in added {
            for (set, strips) in
                [(&mut self.lstrip, token.lstrip), (&mut self.rstrip, token.rstrip)]
            {
                set.retain(|id| *id != token.id as u32);
                if strips {
                    set.push(token.id as u32);
                }
            }
            let known = self.tokens.get(token.id) == Some(&token.content);
            if known && self.model == "t5" && self.types[token.id] != TokenType::Normal {
                continue;
            }
            if token.special || looks_special(&token.content) {
                self.put(token.id, &token.content, TokenType::Control, ADDED_SCORE);
            } else {
                let text = token.content.replace('\u{2581}', " ");
                self.put(token.id, &text, TokenType::UserDefined, ADDED_SCORE);
            }
        }
    }

    /// A special token becomes a part of the text, where the vocabulary has it.
    pub fn show(&mut self, token: &str) {
        if let Some(id) = self.id(token) {
            self.types[id as usize] = TokenType::UserDefined;
        }
    }

    fn pad(&mut self, n: usize) {
        while self.tokens.len() < n {
            self.tokens.push(format!("[PAD{}]", self.tokens.len()));
            self.types.push(TokenType::Unused);
            if let Some(scores) = &mut self.scores {
                scores.push(PAD_SCORE);
            }
        }
    }

    /// Makes the vocabulary as long as the embedding has rows; it cannot be longer.
    pub fn fit(&mut self, n: u64, path: &Path) -> Result<()> {
        if self.tokens.len() as u64 > n {
            let expected = format!("at most {n} tokens, the config's vocab_size");
            let got = self.tokens.len().to_string();
            return Err(Error::format(path, "vocabulary", expected, got));
        }
        self.pad(n as usize);
        Ok(())
    }

    pub fn write(&self, writer: &mut Writer) -> Result<()> {
        writer.set("tokenizer.ggml.model", self.model)?;
        if !self.pre.is_empty() {
            writer.set("tokenizer.ggml.pre", self.pre.clone())?;
        }
        writer.set("tokenizer.ggml.tokens", self.tokens.clone())?;
        if let Some(scores) = self.scores.clone() {
            writer.set("tokenizer.ggml.scores", scores)?;
        }
        let types: Vec<i32> = self.types.iter().map(|t| *t as i32).collect();
        writer.set("tokenizer.ggml.token_type", types)?;
        if let Some(merges) = self.merges.clone() {
            writer.set("tokenizer.ggml.merges", merges)?;
        }
        if let Some(add) = self.add_space_prefix {
            writer.set("tokenizer.ggml.add_space_prefix", add)?;
        }
        if let Some(remove) = self.remove_extra_whitespaces {
            writer.set("tokenizer.ggml.remove_extra_whitespaces", remove)?;
        }
        if !self.charsmap.is_empty() {
            writer.set("tokenizer.ggml.precompiled_charsmap", self.charsmap.clone())?;
        }
        for (key, ids) in [
            ("tokenizer.ggml.lstrip_token_ids", &self.lstrip),
            ("tokenizer.ggml.rstrip_token_ids", &self.rstrip),
        ] {
            if !ids.is_empty() {
                writer.set(key, ids.clone())?;
            }
        }
        Ok(())
    }
}

/// Some checkpoints forget to mark tokens as special whose spelling says that they are.
fn looks_special(token: &str) -> bool {
    let enclosed = |start: &str, end: &str| token.starts_with(start) && token.ends_with(end);
    matches!(token, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
        || enclosed("<|", "|>")
        || enclosed("<｜", "｜>")
        || enclosed("<unused", ">")
}
