//! GGUF vocabularies to text and back: byte-level BPE (`tokenizer.ggml.model` = `gpt2`),
//! SentencePiece BPE (`llama`; `gemma4`, `whitespace` and some `gpt2` with ranked merges) and
//! SentencePiece unigram (`t5`). The core works on a
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
use vocab::SPM_SPACE;

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
    suppressed: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
    space_prefix: SpacePrefix,
    source_language: Option<u32>,
}

/// The parts of a text that are read with a space more before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpacePrefix {
    Nowhere,
    /// SentencePiece's dummy prefix: before the text and again after each special token, because
    /// each stretch between special tokens is a sentence of its own.
    EachPart,
    /// Before a text that starts with neither a special token nor a space.
    Start,
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
            Algorithm::Spm(spm) => (spm.adds_bos(), false, vocab.model == VocabModel::Spm),
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
                VocabModel::SpmMerges if bos => special.bos.is_some(),
                _ => has_token(vocab.add_bos.unwrap_or(bos), special.bos, "begin"),
            },
            add_eos: has_token(vocab.add_eos.unwrap_or(eos), special.eos, "end"),
            space_prefix: if vocab.prepends_first {
                SpacePrefix::Start
            } else if vocab.model != VocabModel::Bpe && vocab.add_space_prefix.unwrap_or(space) {
                SpacePrefix::EachPart
            } else {
                SpacePrefix::Nowhere
            },
            source_language: vocab.source_language,
            suppressed: vocab.suppressed,
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
            suppressed: Vec::new(),
            add_bos: false,
            add_eos: false,
            space_prefix: SpacePrefix::Nowhere,
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
        let (mut at_start, mut after_special) = (true, true);
        self.partition.split(text, options.parse_special, seams, |fragment| {
            after_special = match fragment {
                Fragment::Token(id) => {
                    out.push(id);
                    true
                }
                Fragment::Text(text) => {
                    let prefix_space = match self.space_prefix {
                        SpacePrefix::Nowhere => false,
                        SpacePrefix::EachPart => after_special,
                        SpacePrefix::Start => at_start,
                    };
                    self.encode_text(text, prefix_space, &mut out);
                    false
                }
            };
            at_start = false;
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

    fn encode_text(&self, text: &str, prefix_space: bool, out: &mut Vec<u32>) {
        match &self.algorithm {
            Algorithm::None => {}
            // Bytes of a text are written as they are, U+2581 too.
            Algorithm::Bpe(bpe) if prefix_space && !text.starts_with(SPM_SPACE) => {
                bpe.encode(&format!("{SPM_SPACE}{text}"), out);
            }
            Algorithm::Bpe(bpe) => bpe.encode(text, out),
            Algorithm::Spm(spm) => spm.encode(text, prefix_space, out),
            Algorithm::Ugm(ugm) => ugm.encode(text, prefix_space, out),
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
    /// start of the text and, where each part has one, after a special token.
    fn piece_in_context(
        &self,
        id: u32,
        skip_special: bool,
        after_special: &mut bool,
    ) -> Result<&[u8]> {
        let piece = self.piece(id)?;
        if self.is_special(id) {
            let hide = skip_special && !matches!(self.types[id as usize], TokenType::UserDefined);
            // A token that is not shown leaves the start of the text where it was.
            *after_special = self.space_prefix == SpacePrefix::EachPart || (*after_special && hide);
            return Ok(if hide { b"" } else { piece });
        }
        let strip = std::mem::take(after_special) && self.space_prefix != SpacePrefix::Nowhere;
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

    /// Tokens that no generation takes, as the file says.
    pub fn suppressed(&self) -> &[u32] {
        &self.suppressed
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
