//! GGUF vocabularies to text and back: byte-level BPE (`tokenizer.ggml.model` = `gpt2`),
//! SentencePiece BPE (`llama`, `gemma4`) and SentencePiece unigram (`t5`). The core works on a
//! [`Vocab`] and knows nothing of files; `from_gguf.rs` fills one from metadata.
//!
//! Ids are those of the model's own tokenizer (HF `tokenizers`, `sentencepiece`); where those two
//! leave a choice (the space prefix after a special token, which tokens end a generation) we do
//! what llama.cpp does, as prompts are written with it in mind.

mod bpe;
mod byte_map;
mod charsmap;
mod detokenizer;
mod from_gguf;
mod heap;
mod language;
mod normalize;
mod partition;
pub mod pre;
mod pretokenize;
mod special;
mod spm;
mod ugm;
mod vocab;

pub use byte_map::text_of as byte_level_text;
pub use detokenizer::Detokenizer;
pub use language::is_language;
pub use special::{SpecialIds, ends_by_name, is_doubtful};
pub use vocab::{TokenType, Vocab, VocabModel};

use crate::{Error, Result};
use bpe::Bpe;
use partition::{Fragment, Partition};
use spm::Spm;
use std::collections::BTreeSet;
use ugm::Ugm;

/// Options of `encode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add BOS and EOS where the model asks for them (`add_bos`, `add_eos`).
    pub add_special: bool,
    /// Read control tokens written out in the text (`<|im_end|>`) as those tokens. User-defined
    /// tokens are recognised always. Off for text of unknown origin.
    pub parse_special: bool,
}

impl EncodeOptions {
    /// A prompt as `run` feeds it: BOS where the model wants one, special tokens recognised.
    pub const PROMPT: Self = Self { add_special: true, parse_special: true };
    /// Plain text: nothing added, control tokens are only text.
    pub const TEXT: Self = Self { add_special: false, parse_special: false };
}

enum Algorithm {
    Bpe(Box<Bpe>),
    Spm(Box<Spm>),
    Ugm(Box<Ugm>),
    /// The tokenizer of a file without a vocabulary: no text has tokens.
    None,
}

/// A loaded vocabulary. Immutable; share it between threads as it is.
pub struct Tokenizer {
    algorithm: Algorithm,
    partition: Partition,
    pieces: Pieces,
    texts: Pieces,
    types: Vec<TokenType>,
    special: SpecialIds,
    eog: BTreeSet<u32>,
    add_bos: bool,
    add_eos: bool,
    add_space_prefix: bool,
    source_language: Option<u32>,
}

/// Byte strings by id, in one allocation.
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Pieces {
    fn collect<T: AsRef<[u8]>>(items: impl Iterator<Item = T>) -> Self {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for item in items {
            bytes.extend_from_slice(item.as_ref());
            ends.push(bytes.len());
        }
        Self { bytes, ends }
    }

    fn get(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)?;
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        Some(&self.bytes[start..end])
    }
}

impl Tokenizer {
    /// Validates the vocabulary and builds the look-up tables.
    pub fn new(mut vocab: Vocab) -> Result<Self> {
        vocab.validate()?;
        let (special, eog) = special::resolve(&mut vocab)?;
        let algorithm = match vocab.model {
            VocabModel::Bpe => Algorithm::Bpe(Box::new(Bpe::new(&vocab)?)),
            VocabModel::Spm | VocabModel::SpmMerges => {
                Algorithm::Spm(Box::new(Spm::new(&vocab, special.unk)?))
            }
            VocabModel::Ugm => Algorithm::Ugm(Box::new(Ugm::new(&vocab, special.unk)?)),
        };
        let (bos, eos, space) = match &algorithm {
            Algorithm::Spm(_) => (true, false, vocab.model == VocabModel::Spm),
            Algorithm::Ugm(_) => (false, true, false),
            Algorithm::Bpe(bpe) => (bpe.adds_bos(), false, false),
            Algorithm::None => (false, false, false),
        };
        Ok(Self {
            algorithm,
            partition: Partition::new(&vocab),
            pieces: Pieces::collect((0..vocab.tokens.len()).map(|id| vocab.piece(id))),
            special,
            eog,
            // Some converters say that Gemma 4 has no BOS.
            add_bos: match vocab.model {
                VocabModel::SpmMerges => special.bos.is_some(),
                _ => has_token(vocab.add_bos.unwrap_or(bos), special.bos, "begin"),
            },
            add_eos: has_token(vocab.add_eos.unwrap_or(eos), special.eos, "end"),
            add_space_prefix: vocab.model != VocabModel::Bpe
                && vocab.add_space_prefix.unwrap_or(space),
            source_language: vocab.source_language,
            texts: Pieces::collect(vocab.tokens.iter()),
            types: vocab.types,
        })
    }

    /// For a model whose file has no vocabulary: `n_vocab` tokens that stand for no text.
    pub fn without_text(n_vocab: usize) -> Self {
        let nothing = || Pieces { bytes: Vec::new(), ends: vec![0; n_vocab] };
        Self {
            algorithm: Algorithm::None,
            partition: Partition::new(&Vocab::new(VocabModel::Bpe, Vec::new())),
            pieces: nothing(),
            texts: nothing(),
            types: vec![TokenType::Unused; n_vocab],
            special: SpecialIds::default(),
            eog: BTreeSet::new(),
            add_bos: false,
            add_eos: false,
            add_space_prefix: false,
            source_language: None,
        }
    }

    /// Token ids of `text`. Never fails: what the vocabulary cannot say becomes bytes or `unk`.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<u32> {
        self.encode_in(text, self.source_language, options)
    }

    /// [`encode`](Self::encode) for a text in the language of that token, which stands first if
    /// `options` adds special tokens.
    pub fn encode_in(&self, text: &str, language: Option<u32>, options: EncodeOptions) -> Vec<u32> {
        self.encode_parts(text, language, options, &[])
    }

    /// [`encode`](Self::encode) for a text in which no control token goes across one of the
    /// ascending byte positions `seams`.
    pub fn encode_with_seams(
        &self,
        text: &str,
        options: EncodeOptions,
        seams: &[usize],
    ) -> Vec<u32> {
        self.encode_parts(text, self.source_language, options, seams)
    }

    fn encode_parts(
        &self,
        text: &str,
        language: Option<u32>,
        options: EncodeOptions,
        seams: &[usize],
    ) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        if options.add_special && self.add_bos {
            out.extend(self.special.bos);
        }
        if options.add_special {
            out.extend(language);
        }
        // SentencePiece's dummy prefix stands before the text and again after each special token,
        // because each stretch between special tokens is a sentence of its own.
        let mut after_special = true;
        self.partition.split(text, options.parse_special, seams, |fragment| match fragment {
            Fragment::Token(id) => {
                out.push(id);
                after_special = true;
            }
            Fragment::Text(text) => {
                self.encode_text(text, after_special, &mut out);
                after_special = false;
            }
        });
        if options.add_special && self.add_eos {
            out.extend(self.special.eos);
        }
        if let (true, [a, b, ..]) = (options.add_special && self.add_bos, &out[..])
            && a == b
        {
            log::debug!("the text itself starts with BOS: there are two now");
        }
        out
    }

    fn encode_text(&self, text: &str, after_special: bool, out: &mut Vec<u32>) {
        match &self.algorithm {
            Algorithm::None => {}
            Algorithm::Bpe(bpe) => bpe.encode(text, out),
            Algorithm::Spm(spm) => {
                spm.encode(text, self.add_space_prefix && after_special, out);
            }
            Algorithm::Ugm(ugm) => {
                ugm.encode(text, self.add_space_prefix && after_special, out);
            }
        }
    }

    /// The bytes that `ids` stand for; with `skip_special`, control tokens are left out. Bytes,
    /// because a sequence of tokens may end within a character.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        let mut after_special = true;
        for &id in ids {
            out.extend_from_slice(self.piece_in_context(id, skip_special, &mut after_special)?);
        }
        Ok(out)
    }

    /// [`decode`](Self::decode) with U+FFFD for what is not UTF-8.
    pub fn decode_lossy(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let bytes = self.decode(ids, skip_special)?;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    /// The piece of `id` without the space that `encode` put before it: the first space at the
    /// start of the text and after a special token.
    fn piece_in_context(
        &self,
        id: u32,
        skip_special: bool,
        after_special: &mut bool,
    ) -> Result<&[u8]> {
        let piece = self.piece(id)?;
        if self.is_special(id) {
            *after_special = true;
            let hide = skip_special && !matches!(self.types[id as usize], TokenType::UserDefined);
            return Ok(if hide { b"" } else { piece });
        }
        let strip = std::mem::take(after_special) && self.add_space_prefix;
        Ok(if strip { piece.strip_prefix(b" ").unwrap_or(piece) } else { piece })
    }

    fn out_of_range(&self, id: u32) -> Error {
        let n = self.n_vocab();
        Error::Invalid(format!("token id {id} is out of range: the vocabulary has {n} tokens"))
    }

    /// The bytes that token `id` stands for: a control token's is its name.
    pub fn piece(&self, id: u32) -> Result<&[u8]> {
        self.pieces.get(id).ok_or_else(|| self.out_of_range(id))
    }

    /// The token as the vocabulary writes it (`Ġthe`, `▁the`, `<0x0A>`).
    pub fn text(&self, id: u32) -> Result<&[u8]> {
        self.texts.get(id).ok_or_else(|| self.out_of_range(id))
    }

    pub fn token_type(&self, id: u32) -> Result<TokenType> {
        self.types.get(id as usize).copied().ok_or_else(|| self.out_of_range(id))
    }

    /// The id of a special token by its name (`<|im_end|>`); none for ordinary text.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.partition.find(name)
    }

    pub fn n_vocab(&self) -> usize {
        self.types.len()
    }

    pub fn special(&self) -> &SpecialIds {
        &self.special
    }

    pub fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    pub fn eos(&self) -> Option<u32> {
        self.special.eos
    }

    pub fn eot(&self) -> Option<u32> {
        self.special.eot
    }

    /// Whether `encode` with `add_special` puts BOS first.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether `encode` with `add_special` puts EOS last.
    pub fn add_eos(&self) -> bool {
        self.add_eos
    }

    /// Whether a generation ends with this token (EOS, end of turn, end of message, …).
    pub fn is_eog(&self, id: u32) -> bool {
        self.eog.contains(&id)
    }

    /// All tokens that end a generation, ascending.
    pub fn eog_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.eog.iter().copied()
    }

    /// Whether `id` is a control, unknown or user-defined token: one that the text partition finds.
    pub fn is_special(&self, id: u32) -> bool {
        self.types.get(id as usize).is_some_and(|t| t.is_special())
    }

    /// A special token's name as text, for the templates' `bos_token` and `eos_token`.
    pub fn special_text(&self, id: Option<u32>) -> String {
        let text = id.and_then(|id| self.texts.get(id)).unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.n_vocab())
    }
}

fn has_token(wanted: bool, id: Option<u32>, which: &str) -> bool {
    if wanted && id.is_none() {
        log::warn!("the model asks for a {which}-of-sequence token but names none: none is added");
    }
    wanted && id.is_some()
}
