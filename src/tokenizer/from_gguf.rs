//! A [`Vocab`] from a GGUF file's metadata: the only place here that knows about files.

use super::pre::OF_CHARACTERS;
use super::{TokenType, Tokenizer, Vocab, VocabModel};
use crate::gguf::Gguf;
use crate::{Error, Result};

impl Tokenizer {
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        Self::new(Vocab::from_gguf(gguf)?)
    }
}

/// The key that names a file's kind of vocabulary.
const MODEL: &str = "tokenizer.ggml.model";

/// Names that mean none: a checkpoint that brings no tokenizer, and models made for tests, whose
/// tokens stand for no text.
const NO_VOCABULARY: [&str; 3] = ["none", "no_vocab", "test"];

/// Pre-tokenizers of encoders whose `<mask>` takes the whitespace before it along.
const MASKS: [&str; 4] = ["jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert"];

impl Vocab {
    /// Whether the file has a vocabulary at all, be it one that is known here or not.
    pub fn is_in(gguf: &Gguf) -> Result<bool> {
        Ok(gguf.str(MODEL)?.is_some_and(|name| !NO_VOCABULARY.contains(&name)))
    }

    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let pre = gguf.str("tokenizer.ggml.pre")?.filter(|pre| !pre.is_empty());
        let model = match gguf.str(MODEL)? {
            Some("gpt2") if pre.is_some_and(|pre| OF_CHARACTERS.contains(&pre)) => {
                VocabModel::SpmMerges
            }
            Some("gpt2") => VocabModel::Bpe,
            Some("whitespace") => VocabModel::SpmMerges,
            Some("llama") => VocabModel::Spm,
            Some("gemma4") => VocabModel::SpmMerges,
            Some("t5") => VocabModel::Ugm,
            other => {
                let name = other.map_or("nothing".into(), |name| format!("`{name}`"));
                let got = match Self::is_in(gguf)? {
                    true => name,
                    false => format!(
                        "{name}: the file has no vocabulary, so it can neither read nor write \
                         text; logits, bench and inspect work"
                    ),
                };
                let expected = "`gpt2` (byte-level BPE), `llama` or `gemma4` (SentencePiece \
                                BPE), `t5` (unigram) or `whitespace`";
                return Err(Error::format(gguf.path(), MODEL, expected, got));
            }
        };
        // Of the right type in every file, though only one kind of vocabulary reads them.
        let merges = gguf.strings("tokenizer.ggml.merges")?;
        let types = gguf.i32s("tokenizer.ggml.token_type")?.unwrap_or_default();
        let mut vocab = Self {
            path: gguf.path().to_owned(),
            pre: match gguf.str(MODEL)? {
                // These have one of their own whatever the file says.
                Some(own @ ("gemma4" | "whitespace")) => Some(own.to_owned()),
                _ => pre.map(str::to_owned),
            },
            scores: gguf.f32s("tokenizer.ggml.scores")?.unwrap_or_default(),
            types: types.into_iter().map(TokenType::from_number).collect(),
            merges: owned(match (model, merges) {
                (VocabModel::Spm | VocabModel::Ugm, _) => Vec::new(),
                (_, None) => gguf.require_strings("tokenizer.ggml.merges")?,
                (_, Some(merges)) => merges,
            }),
            add_bos: gguf.bool("tokenizer.ggml.add_bos_token")?,
            add_eos: gguf.bool("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: gguf.bool("tokenizer.ggml.add_space_prefix")?,
            prepends_first: prepends_first(gguf, model)?,
            nfc: gguf.bool("tokenizer.ggml.normalizer.nfc")?,
            lowercase: gguf.bool("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(false),
            remove_extra_whitespaces: gguf.bool("tokenizer.ggml.remove_extra_whitespaces")?,
            charsmap: charsmap(gguf)?,
            source_language: id(gguf, "tokenizer.ggml.source_language_token_id")?,
            ends: gguf.u32s("tokenizer.ggml.eog_token_ids")?.unwrap_or_default(),
            suppressed: suppressed(gguf)?,
            lstrip: gguf.u32s("tokenizer.ggml.lstrip_token_ids")?.unwrap_or_default(),
            rstrip: gguf.u32s("tokenizer.ggml.rstrip_token_ids")?.unwrap_or_default(),
            ..Self::new(model, owned(gguf.require_strings("tokenizer.ggml.tokens")?))
        };
        for (name, slot) in vocab.ids.fields() {
            *slot = id(gguf, &format!("tokenizer.ggml.{name}"))?;
        }
        if vocab.pre.as_deref().is_some_and(|pre| MASKS.contains(&pre)) {
            let mask = vocab.tokens.iter().position(|token| token == b"<mask>");
            vocab.lstrip.extend(mask.map(|id| id as u32));
        }
        Ok(vocab)
    }
}

/// With scores, SentencePiece's rule holds whatever the scheme, as `add_space_prefix` says.
fn prepends_first(gguf: &Gguf, model: VocabModel) -> Result<bool> {
    let key = "tokenizer.ggml.metaspace.prepend_scheme";
    let is_ranked = matches!(model, VocabModel::Bpe | VocabModel::SpmMerges);
    let (expected, got) = match gguf.str(key)? {
        None | Some("never") => return Ok(false),
        Some("first") => return Ok(is_ranked),
        Some("always") if !is_ranked => return Ok(false),
        Some("always") => ("`never` or `first` with ranked merges", "always"),
        Some(other) => ("`never`, `first` or `always`", other),
    };
    Err(Error::format(gguf.path(), key, expected, format!("`{got}`")))
}

/// Negative ids are none.
fn suppressed(gguf: &Gguf) -> Result<Vec<u32>> {
    let ids = gguf.i32s("tokenizer.ggml.suppress_tokens")?.unwrap_or_default();
    Ok(ids.into_iter().filter_map(|id| id.try_into().ok()).collect())
}

/// Bytes, which writers store as u8 or i8.
fn charsmap(gguf: &Gguf) -> Result<Vec<u8>> {
    let bytes = gguf.i32s("tokenizer.ggml.precompiled_charsmap")?.unwrap_or_default();
    Ok(bytes.into_iter().map(|byte| byte as u8).collect())
}

fn owned(strings: Vec<&[u8]>) -> Vec<Vec<u8>> {
    strings.into_iter().map(<[u8]>::to_vec).collect()
}

/// A token id; −1, signed or as the largest u32, is some converters' "none".
fn id(gguf: &Gguf, key: &str) -> Result<Option<u32>> {
    match gguf.get(key).and_then(|value| value.as_i64()) {
        Some(-1) => Ok(None),
        _ => Ok(gguf.u32(key)?.filter(|&id| id != u32::MAX)),
    }
}
