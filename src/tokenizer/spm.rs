//! SentencePiece BPE: characters merge into ever longer pieces of the vocabulary, best score first;
//! a character that is no piece becomes its bytes (`<0x0A>`), or `unk` where the vocabulary has no
//! such bytes. Most files of this kind (Llama) do not normalise the text beyond writing spaces as
//! U+2581; NLLB's bring a charsmap. Gemma 4's and others rank pairs of pieces instead.

use super::heap::Merger;
use super::normalize::Normalizer;
use super::vocab::{SPM_SPACE, TokenType, Vocab, VocabModel, byte_of, split_merge};
use crate::Result;
use regex::Regex;
use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::OnceLock;

pub struct Spm {
    normalizer: Normalizer,
    ids: HashMap<Vec<u8>, u32>,
    scores: Vec<f32>,
    /// `Some` if merges are ranked and pieces have no scores.
    ranked: Option<Ranked>,
    /// Length in bytes of the longest piece: no pair longer than that is looked up.
    longest: usize,
    bytes: [Option<u32>; 256],
    unk: Option<u32>,
}

/// Merges by rank, and where a text is cut before they apply.
struct Ranked {
    /// (left, right) → rank.
    ranks: HashMap<(u32, u32), u32>,
    cut: Cut,
}

enum Cut {
    /// Around runs of line breaks.
    Lines,
    /// Around runs of line breaks, each of which is one piece if there is such a piece.
    LinesAndBreaks,
    /// In lines, and each before its spaces; a line that starts with none gets one.
    Words,
    /// Lower case, a space for each run of whitespace; digits, words and others apart.
    Soprano,
    /// At whitespace, which is dropped.
    Whitespace { lowercase: bool },
}

impl Cut {
    fn of(vocab: &Vocab) -> Cut {
        match vocab.pre.as_deref() {
            Some("sarvam-moe" | "domyn-small") => Cut::Lines,
            Some("mmbert") => Cut::Words,
            Some("soprano") => Cut::Soprano,
            Some("whitespace") => Cut::Whitespace { lowercase: vocab.lowercase },
            _ => Cut::LinesAndBreaks,
        }
    }

    /// Calls `each` with the parts of `text` in order, spelt as pieces are.
    fn parts(&self, text: &str, mut each: impl FnMut(&str)) {
        match self {
            Cut::Lines | Cut::LinesAndBreaks => lines(text, each),
            Cut::Words => lines(text, |line| match line.starts_with('\n') {
                true => each(line),
                false => words(line, &mut each),
            }),
            Cut::Soprano => {
                static PART: OnceLock<Regex> = OnceLock::new();
                let pattern = r"\p{N}| +|[\p{L}_]+|[^\p{L}\p{N}_ ]+";
                let part = PART.get_or_init(|| Regex::new(pattern).expect("a constant pattern"));
                part.find_iter(&soprano(text)).for_each(|part| each(part.as_str()));
            }
            Cut::Whitespace { lowercase: false } => text.split_whitespace().for_each(each),
            Cut::Whitespace { lowercase: true } => lower(text).split_whitespace().for_each(each),
        }
    }
}

/// Runs of line breaks and what is between them.
fn lines(text: &str, mut each: impl FnMut(&str)) {
    let is_break = |c: char| c == '\n';
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| is_break(c) != is_break(first)).unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        each(part);
        rest = after;
    }
}

/// Parts that start with a space each.
fn words(line: &str, each: &mut impl FnMut(&str)) {
    let line = match line.starts_with(SPM_SPACE) {
        true => line.to_owned(),
        false => format!("{SPM_SPACE}{line}"),
    };
    let mut starts: Vec<usize> = line.match_indices(SPM_SPACE).map(|(at, _)| at).collect();
    starts.push(line.len());
    starts.windows(2).for_each(|ends| each(&line[ends[0]..ends[1]]));
}

/// Character by character: no letter's lower case depends on where it stands.
fn lower(text: &str) -> String {
    text.chars().flat_map(char::to_lowercase).collect()
}

fn soprano(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_whitespace() {
            true if out.ends_with(' ') => {}
            true => out.push(' '),
            false => out.extend(c.to_lowercase()),
        }
    }
    out
}

/// A score as a merge key: the highest first. Validation refused NaN, so the order is total; −0
/// and 0 are equal (the first piece that SentencePiece learns has the score −0).
struct ByScore(f32);

impl Ord for ByScore {
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.partial_cmp(&self.0).unwrap_or(Ordering::Equal)
    }
}

impl PartialOrd for ByScore {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for ByScore {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for ByScore {}

impl Spm {
    pub fn new(vocab: &Vocab, unk: Option<u32>) -> Result<Self> {
        let mut ids = HashMap::with_capacity(vocab.tokens.len());
        let mut bytes = [None; 256];
        for (id, (token, kind)) in vocab.tokens.iter().zip(&vocab.types).enumerate() {
            let id = id as u32;
            match kind {
                // Text that merely spells `<s>` or `<0x41>` is text, as in SentencePiece.
                TokenType::Control | TokenType::Unknown => {}
                TokenType::Byte => {
                    if let Some(byte) = byte_of(token) {
                        bytes[byte as usize] = Some(id);
                    }
                }
                _ => _ = ids.insert(token.clone(), id),
            }
        }
        let longest = ids.keys().map(Vec::len).max().unwrap_or(0);
        let normalizer = Normalizer::new(vocab)?;
        let ranked = (vocab.model == VocabModel::SpmMerges)
            .then(|| Ranked { ranks: ranks(vocab, &ids), cut: Cut::of(vocab) });
        let scores = vocab.scores.clone();
        Ok(Self { normalizer, ids, scores, ranked, longest, bytes, unk })
    }

    /// Whether BOS is added when the file does not say: only some of those with ranks have none.
    pub fn adds_bos(&self) -> bool {
        !matches!(&self.ranked, Some(ranked) if !matches!(ranked.cut, Cut::LinesAndBreaks))
    }

    pub fn encode(&self, text: &str, prefix_space: bool, out: &mut Vec<u32>) {
        let Some(Ranked { cut, .. }) = &self.ranked else {
            return self.merge(&self.normalizer.apply(text, prefix_space), out);
        };
        let text = match cut {
            // Spaces stay what they are.
            Cut::Soprano | Cut::Whitespace { .. } => Cow::Borrowed(text),
            // One that the text starts with is not doubled.
            _ => self.normalizer.apply(text, prefix_space && !text.starts_with([' ', '▁'])).into(),
        };
        cut.parts(&text, |part| {
            let is_whole =
                matches!(cut, Cut::LinesAndBreaks | Cut::Words) && part.starts_with('\n');
            match self.ids.get(part.as_bytes()).filter(|_| is_whole) {
                Some(id) => out.push(*id),
                None => self.merge(part, out),
            }
        });
    }

    fn merge(&self, text: &str, out: &mut Vec<u32>) {
        // A symbol is where its text starts: its end is known through `ends`, because the merger
        // keeps symbols apart by number only and a merge leaves the start where it was.
        let starts: Vec<u32> = text.char_indices().map(|(i, _)| i as u32).collect();
        let mut spans = Spans::new(text, &starts);
        let mut merger = Merger::new();
        let mut pieces = Vec::new();
        merger.run(
            0..starts.len() as u32,
            |left, right| {
                let (start, end) = (spans.start(left), spans.end(right));
                if end - start > self.longest {
                    return None;
                }
                let id = *self.ids.get(&text.as_bytes()[start..end])?;
                let score = match &self.ranked {
                    None => self.scores[id as usize],
                    Some(Ranked { ranks, .. }) => {
                        let middle = spans.end(left);
                        let left = self.ids.get(&text.as_bytes()[start..middle])?;
                        let right = self.ids.get(&text.as_bytes()[middle..end])?;
                        -(*ranks.get(&(*left, *right))? as f32)
                    }
                };
                Some((ByScore(score), spans.add(start, end)))
            },
            |symbol| pieces.push(symbol),
        );
        let mut unknown_before = false;
        for symbol in pieces {
            let piece = &text[spans.start(symbol)..spans.end(symbol)];
            let unknown = !self.push_piece(piece, unknown_before, out);
            unknown_before = unknown;
        }
    }

    /// Appends the ids of a piece; false if it was unknown. Neighbouring unknown characters are
    /// one `unk`. With ranks, bytes that the vocabulary lacks are dropped; Soprano's, which lacks
    /// all, has an `unk` for each character.
    fn push_piece(&self, piece: &str, unknown_before: bool, out: &mut Vec<u32>) -> bool {
        if let Some(&id) = self.ids.get(piece.as_bytes()) {
            out.push(id);
            return true;
        }
        let is_soprano = matches!(&self.ranked, Some(Ranked { cut: Cut::Soprano, .. }));
        if is_soprano {
            out.extend(self.unk);
            return true;
        }
        if self.ranked.is_some() || piece.bytes().all(|b| self.bytes[b as usize].is_some()) {
            out.extend(piece.bytes().filter_map(|b| self.bytes[b as usize]));
            return true;
        }
        if !unknown_before {
            out.extend(self.unk);
        }
        false
    }
}

/// Merges of two pieces by their ids. Ranks are exact as floats.
fn ranks(vocab: &Vocab, ids: &HashMap<Vec<u8>, u32>) -> HashMap<(u32, u32), u32> {
    let pair = |merge: &Vec<u8>| {
        let (left, right) = split_merge(merge)?;
        Some((*ids.get(left)?, *ids.get(right)?))
    };
    let mut ranks = HashMap::with_capacity(vocab.merges.len());
    for (rank, merge) in vocab.merges.iter().enumerate().take(1 << 24) {
        if let Some(pair) = pair(merge) {
            // A merge listed twice has its first rank.
            ranks.entry(pair).or_insert(rank as u32);
        }
    }
    ranks
}

/// Stretches of the text by symbol number: the characters first, merge results after them.
struct Spans {
    spans: Vec<(u32, u32)>,
}

impl Spans {
    fn new(text: &str, starts: &[u32]) -> Self {
        let ends = starts.iter().skip(1).copied().chain([text.len() as u32]);
        Self { spans: starts.iter().copied().zip(ends).collect() }
    }

    fn start(&self, symbol: u32) -> usize {
        self.spans[symbol as usize].0 as usize
    }

    fn end(&self, symbol: u32) -> usize {
        self.spans[symbol as usize].1 as usize
    }

    fn add(&mut self, start: usize, end: usize) -> u32 {
        self.spans.push((start as u32, end as u32));
        self.spans.len() as u32 - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranked_merges_and_line_breaks() {
        let tokens = ["a", "b", "ab", "\u{2581}", "\u{2581}a", "\n\n", "<0x0A>", "<0x63>", "ba"];
        let tokens = tokens.map(|token| token.as_bytes().to_vec()).to_vec();
        let mut vocab = Vocab::new(VocabModel::SpmMerges, tokens);
        vocab.types = vec![TokenType::Normal; 9];
        vocab.types[6..8].fill(TokenType::Byte);
        vocab.merges = ["\u{2581} a", "b a", "a b"].map(|merge| merge.as_bytes().to_vec()).to_vec();
        let spm = Spm::new(&vocab, None).unwrap();
        let ids = |text: &str| {
            let mut out = Vec::new();
            spm.encode(text, false, &mut out);
            out
        };
        assert_eq!(ids("ab a"), [2, 4]);
        // The better rank first, wherever it stands.
        assert_eq!(ids("aba"), [0, 8]);
        assert_eq!(ids("a\n\nb\nc"), [0, 5, 1, 6, 7]);
    }
}
