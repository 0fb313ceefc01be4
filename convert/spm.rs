//! `tokenizer.model`: SentencePiece's `ModelProto`, the few fields of it that a GGUF file keeps.
//! Field numbers are those of sentencepiece_model.proto.

use std::fs;
use std::path::Path;

use prost::Message;

use super::json::Json;
use super::vocab::{AddedToken, TokenType, Vocab};
use crate::{Error, Result};

#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<NormalizerSpec>,
}

#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(string, optional, tag = "1")]
    text: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    ty: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct TrainerSpec {
    /// 1 unigram, 2 BPE, 3 word, 4 char
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    treat_whitespace_as_suffix: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
struct NormalizerSpec {
    #[prost(bytes = "vec", optional, tag = "2")]
    precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    remove_extra_whitespaces: Option<bool>,
}

const UNIGRAM: i32 = 1;
const BPE: i32 = 2;

/// No tokenizer comes near; a larger file is something else.
const MAX_BYTES: u64 = 1 << 28;

/// Which ids the pieces have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The model's own.
    Own,
    /// Fairseq's: four tokens of its own instead of the model's three, the others one higher.
    Fairseq,
}

impl Order {
    fn id(self, id: usize) -> usize {
        match (self, id) {
            (Self::Own, id) => id,
            // Models begin with <unk>, <s> and </s>; fairseq with <s>, <pad>, </s> and <unk>.
            (Self::Fairseq, 0) => 3,
            (Self::Fairseq, 1) => 0,
            (Self::Fairseq, 2) => 2,
            (Self::Fairseq, id) => id + 1,
        }
    }
}

/// Reads the pieces; `added` tokens extend or retype them.
pub fn read(
    path: &Path,
    order: Order,
    config: Option<&Json>,
    added: &[AddedToken],
) -> Result<Vocab> {
    let proto = parse(path)?;
    let prefix = proto.normalizer.as_ref().and_then(|n| n.add_dummy_prefix).unwrap_or(true);
    let prefix = match config.map(|c| c.bool("add_prefix_space")).transpose()?.flatten() {
        Some(stated) => stated,
        None => prefix,
    };
    let normalizer = proto.normalizer.unwrap_or_default();
    // The format's default is unigram, and to remove surplus spaces.
    let unigram = proto.trainer.and_then(|t| t.model_type).unwrap_or(UNIGRAM) == UNIGRAM;
    let remove = normalizer.remove_extra_whitespaces.unwrap_or(true);
    let mut vocab = Vocab::sentencepiece(if unigram { "t5" } else { "llama" });
    vocab.add_space_prefix = Some(prefix);
    vocab.charsmap = normalizer.precompiled_charsmap.unwrap_or_default();
    // llama.cpp's files say it of unigram models only; of others we do where it matters.
    vocab.remove_extra_whitespaces = (unigram || remove).then_some(remove);
    for (id, piece) in proto.pieces.into_iter().enumerate() {
        let text = piece.text.unwrap_or_default();
        vocab.put(order.id(id), &text, piece_type(path, id, piece.ty)?, piece.score.unwrap_or(0.0));
    }
    vocab.put_added(added);
    Ok(vocab)
}

fn parse(path: &Path) -> Result<ModelProto> {
    let n_bytes = fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    if n_bytes > MAX_BYTES {
        let expected = format!("at most {MAX_BYTES} bytes");
        return Err(Error::format(path, "size", expected, n_bytes.to_string()));
    }
    let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    let expected = "a SentencePiece model";
    let proto = ModelProto::decode(&bytes[..])
        .map_err(|e| Error::format(path, "content", expected, e.to_string()))?;
    if proto.pieces.is_empty() {
        return Err(Error::format(path, "pieces", "at least one", "none"));
    }
    let trainer = proto.trainer.clone().unwrap_or_default();
    if trainer.treat_whitespace_as_suffix == Some(true) {
        let field = "trainer_spec.treat_whitespace_as_suffix";
        return Err(Error::format(path, field, "false", "true"));
    }
    match trainer.model_type.unwrap_or(UNIGRAM) {
        UNIGRAM | BPE => Ok(proto),
        other => {
            let expected = format!("{UNIGRAM} (unigram) or {BPE} (BPE)");
            Err(Error::format(path, "trainer_spec.model_type", expected, other.to_string()))
        }
    }
}

fn piece_type(path: &Path, id: usize, ty: Option<i32>) -> Result<TokenType> {
    use TokenType::*;
    let known = [Normal, Unknown, Control, UserDefined, Unused, Byte];
    let ty = ty.unwrap_or(Normal as i32);
    known
        .into_iter()
        .find(|t| *t as i32 == ty)
        .ok_or_else(|| Error::format(path, format!("piece {id}: type"), "1 to 6", ty.to_string()))
}
