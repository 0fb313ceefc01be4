//! Which tokens have a role: those that metadata names, those found by their usual names, and the
//! set that ends a generation. The lists of names are the vocabularies' own; which of them count is
//! as in llama.cpp, because a file that stops there must stop here.

use super::vocab::{TokenType, Vocab, VocabModel, split_merge};
use crate::Result;
use std::collections::{BTreeSet, HashMap, HashSet};

/// Tokens with a role, by id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unk: Option<u32>,
    pub sep: Option<u32>,
    pub pad: Option<u32>,
    pub mask: Option<u32>,
    /// End of turn.
    pub eot: Option<u32>,
    /// End of message (a tool call follows).
    pub eom: Option<u32>,
    pub fim_pre: Option<u32>,
    pub fim_suf: Option<u32>,
    pub fim_mid: Option<u32>,
    pub fim_pad: Option<u32>,
    pub fim_rep: Option<u32>,
    pub fim_sep: Option<u32>,
}

impl SpecialIds {
    /// The ids with the metadata keys (after `tokenizer.ggml.`) that set them, older keys last.
    pub(super) fn fields(&mut self) -> [(&'static str, &mut Option<u32>); 14] {
        [
            ("bos_token_id", &mut self.bos),
            ("eos_token_id", &mut self.eos),
            ("unknown_token_id", &mut self.unk),
            ("seperator_token_id", &mut self.sep),
            ("padding_token_id", &mut self.pad),
            ("mask_token_id", &mut self.mask),
            ("eot_token_id", &mut self.eot),
            ("eom_token_id", &mut self.eom),
            ("fim_pre_token_id", &mut self.fim_pre),
            ("fim_suf_token_id", &mut self.fim_suf),
            ("fim_mid_token_id", &mut self.fim_mid),
            ("fim_pad_token_id", &mut self.fim_pad),
            ("fim_rep_token_id", &mut self.fim_rep),
            ("fim_sep_token_id", &mut self.fim_sep),
        ]
    }
}

const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

const END_OF_MESSAGE: &[&str] = &["<|eom_id|>"];

const FIM_PAD: &[&str] = &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"];

const FIM_REPOSITORY: &[&str] =
    &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"];

const FIM_SEPARATOR: &[&str] = &["<|file_sep|>"];

/// Names that end a generation wherever they are in a vocabulary, beside those above.
const END_OF_GENERATION: &[&str] = &[
    "<|eot_id|>",
    "<|eot|>",
    "<|im_end|>",
    "<|ifm|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Whether a token of this name ends a generation without any key that says so.
pub fn ends_by_name(name: &str) -> bool {
    END_OF_GENERATION.contains(&name)
}

/// Whether such a token is none where the vocabulary has other tokens for the end.
pub fn is_doubtful(name: &str) -> bool {
    matches!(name, "<|end|>" | "</s>")
}

/// Not an end of generation, but if it exists, `</s>` is not one either.
const PLAMO_EOS: &str = "<|plamo:eos|>";

/// Beam's start of a call's parameter, of which the same is true.
const BEAM_PARAMETER: &str = "<rfl:parameter name=\"";

/// Flint's answers end where another one's turn begins.
const FLINT_TURNS: &[&str] = &["<|user|>", "<|observation|>"];

/// Ids by name, for the few names above.
struct ByName(HashMap<Vec<u8>, u32>);

impl ByName {
    fn new(vocab: &Vocab) -> Self {
        let lists = [
            END_OF_TURN,
            END_OF_MESSAGE,
            FIM_PAD,
            FIM_REPOSITORY,
            FIM_SEPARATOR,
            END_OF_GENERATION,
            FLINT_TURNS,
            &[PLAMO_EOS, BEAM_PARAMETER],
        ];
        let wanted: HashSet<&[u8]> =
            lists.into_iter().flatten().map(|name| name.as_bytes()).collect();
        let tokens = vocab.tokens.iter().zip(0u32..);
        let named = tokens.filter(|(token, _)| wanted.contains(token.as_slice()));
        Self(named.map(|(token, id)| (token.clone(), id)).collect())
    }

    fn get(&self, name: &str) -> Option<u32> {
        self.0.get(name.as_bytes()).copied()
    }

    fn first(&self, names: &[&str]) -> Option<u32> {
        names.iter().find_map(|name| self.get(name))
    }
}

/// Checks the ids that metadata names, finds the others by name, and marks them as control tokens.
pub(super) fn resolve(vocab: &mut Vocab) -> Result<(SpecialIds, BTreeSet<u32>)> {
    let mut ids = vocab.ids;
    check_range(vocab, &mut ids)?;
    let defaults: &mut [(&mut Option<u32>, u32)] = match vocab.model {
        VocabModel::Bpe | VocabModel::SpmMerges => &mut [],
        // SentencePiece's own.
        VocabModel::Spm => &mut [(&mut ids.unk, 0), (&mut ids.bos, 1), (&mut ids.eos, 2)],
        // T5's.
        VocabModel::Ugm => &mut [(&mut ids.pad, 0), (&mut ids.eos, 1), (&mut ids.unk, 2)],
    };
    for (slot, id) in defaults {
        if slot.is_none() && (*id as usize) < vocab.tokens.len() {
            **slot = Some(*id);
        }
    }
    let names = ByName::new(vocab);
    for (slot, candidates) in [
        (&mut ids.eot, END_OF_TURN),
        (&mut ids.eom, END_OF_MESSAGE),
        (&mut ids.fim_pad, FIM_PAD),
        (&mut ids.fim_rep, FIM_REPOSITORY),
        (&mut ids.fim_sep, FIM_SEPARATOR),
    ] {
        if slot.is_none() {
            *slot = names.first(candidates);
            mark_control(vocab, *slot);
        }
    }
    let eog = end_of_generation(vocab, &ids, &names);
    Ok((ids, eog))
}

/// Some converters write "none" as −1, which reads as the largest u32; anything else that is not in
/// the vocabulary is a broken file.
fn check_range(vocab: &Vocab, ids: &mut SpecialIds) -> Result<()> {
    let n = vocab.tokens.len();
    for (key, slot) in ids.fields() {
        match *slot {
            Some(u32::MAX) => *slot = None,
            Some(id) if id as usize >= n => {
                let expected = format!("a token id below {n}");
                return Err(vocab.error(key, &expected, id.to_string()));
            }
            _ => {}
        }
    }
    if let Some(id) = vocab.ends.iter().find(|id| **id as usize >= n) {
        let expected = format!("token ids below {n}");
        return Err(vocab.error("eog_token_ids", &expected, id.to_string()));
    }
    match vocab.source_language {
        Some(id) if id as usize >= n => {
            let expected = format!("a token id below {n}");
            Err(vocab.error("source_language_token_id", &expected, id.to_string()))
        }
        _ => Ok(()),
    }
}

/// A token with such a name that is not marked as control is an oversight of the converter: it
/// would be printed, and not be recognised in a prompt. Not so where merges make it: then it is a
/// word like others (Qwen2's vocabulary has `</s>`, the HTML tag).
fn mark_control(vocab: &mut Vocab, id: Option<u32>) {
    let Some(id) = id else { return };
    let token = &vocab.tokens[id as usize];
    if vocab.types[id as usize] == TokenType::Control || is_merged(vocab, token) {
        return;
    }
    let name = String::from_utf8_lossy(token);
    log::debug!("token {id} ({name}) is treated as a control token");
    vocab.types[id as usize] = TokenType::Control;
}

fn is_merged(vocab: &Vocab, token: &[u8]) -> bool {
    let makes = |(left, right): (&[u8], &[u8])| {
        left.len() + right.len() == token.len() && token.starts_with(left) && token.ends_with(right)
    };
    vocab.merges.iter().filter_map(|merge| split_merge(merge)).any(makes)
}

fn end_of_generation(vocab: &mut Vocab, ids: &SpecialIds, names: &ByName) -> BTreeSet<u32> {
    let mut eog: BTreeSet<u32> =
        [ids.fim_pad, ids.fim_rep, ids.fim_sep].into_iter().flatten().collect();
    let is_flint = vocab.pre.as_deref() == Some("flint");
    let turns = if is_flint { FLINT_TURNS } else { &[] };
    for id in END_OF_GENERATION.iter().chain(turns).filter_map(|name| names.get(name)) {
        mark_control(vocab, Some(id));
        eog.insert(id);
    }
    eog.extend([ids.eos, ids.eot, ids.eom].into_iter().flatten());
    // Where a vocabulary has separate tokens for "the answer ends" and "a call follows",
    // `<|end|>` only ends one message of several (gpt-oss, Solar Open).
    let has = |name| names.get(name).is_some_and(|id| eog.contains(&id));
    let calls = has("<|call|>") || has("<|calls|>");
    let harmony = calls && (has("<|return|>") || has("<|flush|>"));
    // Gemma 4's, PLaMo's and Beam's vocabularies carry an ordinary `</s>` (an HTML tag).
    let html = has("<|tool_response>") || has(PLAMO_EOS) || names.get(BEAM_PARAMETER).is_some();
    for (applies, name, kind) in
        [(harmony, "<|end|>", TokenType::UserDefined), (html, "</s>", TokenType::Normal)]
    {
        if let (true, Some(id)) = (applies, names.get(name)) {
            eog.remove(&id);
            vocab.types[id as usize] = kind;
        }
    }
    // What the file lists ends a generation whatever its name.
    eog.extend(&vocab.ends);
    eog
}
