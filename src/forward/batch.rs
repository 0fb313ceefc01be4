//! A batch: the rows that one forward pass computes together, of one text or of several.
//!
//! A *row* is one token; every buffer of a pass has a row for each. Consecutive tokens of one text
//! are a *segment*: its rows lie side by side, in the order of their positions. Norms, products and
//! experts work on all rows at once; attention, recurrent states, events and logits on one segment
//! at a time. A text's results have the same bits in any batch.

use crate::policy::Phase;
use std::ops::Range;

/// Consecutive tokens of one text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the text's cache among those that the pass is given.
    pub session: usize,
    /// The number by which policies know the text.
    pub request: u32,
    /// Position of the first token: how many tokens of the text the cache holds.
    pub past: usize,
    /// Whether the tokens are part of a prompt or a step of decode.
    pub phase: Phase,
    /// Which of the tokens get logits.
    pub want: Want,
}

/// Which tokens of a segment get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    None,
    Last,
    All,
    /// The last token, but only the `k` greatest of its logits are needed.
    LastBest(TopK),
}

/// The `k` greatest logits of the first `n_vocab` ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopK {
    pub k: usize,
    pub n_vocab: usize,
}

impl Want {
    /// The first of `n` tokens that gets logits; all tokens after it do.
    fn first(self, n: usize) -> Option<usize> {
        match self {
            Want::None => None,
            Want::Last | Want::LastBest(_) => n.checked_sub(1),
            Want::All => Some(0),
        }
    }
}

/// A row that gets logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitRow {
    pub row: usize,
    /// Of the segment.
    pub session: usize,
    /// Index of the token in its segment.
    pub token: usize,
    /// The best logits that suffice, if not all are wanted.
    pub best: Option<TopK>,
}

/// Rows of one or several texts. Segments of decode come first.
#[derive(Debug, Default)]
pub struct Batch {
    /// [rows]
    tokens: Vec<u32>,
    segments: Vec<Segment>,
    /// The row behind each segment's last.
    ends: Vec<usize>,
    /// How much of each adapter of the model the texts take, [sessions, adapters], and the rows,
    /// [rows, adapters]; empty without any.
    factors: Vec<f32>,
    row_factors: Vec<f32>,
    n_adapters: usize,
}

impl Batch {
    /// A batch of one segment.
    pub fn one(segment: Segment, tokens: &[u32]) -> Batch {
        let mut batch = Batch::default();
        batch.push(segment, tokens);
        batch
    }

    /// Removes all rows and keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.segments.clear();
        self.ends.clear();
        self.adapt(0, Vec::new());
    }

    /// Sets how much of each of `n_adapters` the texts take, [sessions, adapters], once all rows
    /// are there.
    pub fn adapt(&mut self, n_adapters: usize, factors: Vec<f32>) {
        let mut rows = std::mem::take(&mut self.row_factors);
        rows.clear();
        (self.n_adapters, self.factors) = (n_adapters, factors);
        if n_adapters > 0 {
            for (range, segment) in self.segments() {
                range.for_each(|_| rows.extend_from_slice(self.factors_of(segment.session)));
            }
        }
        self.row_factors = rows;
    }

    /// How much of each adapter a text takes.
    pub fn factors_of(&self, session: usize) -> &[f32] {
        &self.factors[session * self.n_adapters..][..self.n_adapters]
    }

    /// How much of each adapter the rows take, [rows, adapters].
    pub fn row_factors(&self) -> (&[f32], usize) {
        (&self.row_factors, self.n_adapters)
    }

    /// Adds tokens of a text, of which the batch has none yet.
    pub fn push(&mut self, segment: Segment, tokens: &[u32]) {
        assert!(!tokens.is_empty(), "a segment has at least one token");
        let is_new = self.segments.iter().all(|other| other.session != segment.session);
        assert!(is_new, "session {} has a segment already", segment.session);
        let is_before = |other: &Segment| other.phase == Phase::Decode;
        let at = match segment.phase {
            Phase::Decode => self.segments.partition_point(is_before),
            Phase::Prompt => self.segments.len(),
        };
        let start = self.start(at);
        self.tokens.splice(start..start, tokens.iter().copied());
        self.segments.insert(at, segment);
        self.ends.insert(at, start);
        self.ends[at..].iter_mut().for_each(|end| *end += tokens.len());
    }

    /// `[rows]`
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn n_rows(&self) -> usize {
        self.tokens.len()
    }

    pub fn n_segments(&self) -> usize {
        self.segments.len()
    }

    /// The segments and their rows, in the order of the rows.
    pub fn segments(&self) -> impl Iterator<Item = (Range<usize>, &Segment)> {
        (0..self.segments.len()).map(|i| (self.start(i)..self.ends[i], &self.segments[i]))
    }

    /// Rows of decode; those of prompts follow.
    pub fn decode_rows(&self) -> Range<usize> {
        let n = self.segments.partition_point(|segment| segment.phase == Phase::Decode);
        0..self.start(n)
    }

    /// The rows that get logits, in ascending order.
    pub fn logit_rows(&self) -> impl Iterator<Item = LogitRow> {
        self.segments().flat_map(|(rows, segment)| {
            let best = match segment.want {
                Want::LastBest(best) => Some(best),
                Want::None | Want::Last | Want::All => None,
            };
            let first = segment.want.first(rows.len()).unwrap_or(rows.len());
            let row = move |token| LogitRow {
                row: rows.start + token,
                session: segment.session,
                token,
                best,
            };
            (first..rows.len()).map(row)
        })
    }

    /// The rows that get logits, as a batch of their own.
    pub fn wanted(&self) -> Batch {
        let mut batch = Batch::default();
        for (rows, segment) in self.segments() {
            if let Some(first) = segment.want.first(rows.len()) {
                let tokens = &self.tokens[rows.start + first..rows.end];
                batch.push(Segment { past: segment.past + first, ..*segment }, tokens);
            }
        }
        batch.adapt(self.n_adapters, self.factors.clone());
        batch
    }

    fn start(&self, i: usize) -> usize {
        i.checked_sub(1).map_or(0, |before| self.ends[before])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(session: usize, phase: Phase, want: Want) -> Segment {
        Segment { session, request: 10 + session as u32, past: 7, phase, want }
    }

    #[test]
    fn segments_of_decode_come_first() {
        let mut batch = Batch::default();
        batch.push(segment(0, Phase::Prompt, Want::All), &[1, 2, 3]);
        batch.push(segment(1, Phase::Decode, Want::Last), &[4]);
        batch.push(segment(2, Phase::Prompt, Want::None), &[5, 6]);
        batch.push(segment(3, Phase::Decode, Want::Last), &[7, 8]);
        assert_eq!(batch.tokens(), [4, 7, 8, 1, 2, 3, 5, 6]);
        let segments: Vec<_> = batch.segments().map(|(rows, s)| (s.session, rows)).collect();
        assert_eq!(segments, [(1, 0..1), (3, 1..3), (0, 3..6), (2, 6..8)]);
        assert_eq!((batch.n_rows(), batch.n_segments(), batch.decode_rows()), (8, 4, 0..3));
        batch.clear();
        assert_eq!((batch.n_rows(), batch.decode_rows()), (0, 0..0));
        batch.push(segment(1, Phase::Decode, Want::Last), &[9]);
        assert_eq!((batch.tokens(), batch.decode_rows()), (&[9][..], 0..1));
    }

    #[test]
    fn each_segment_names_the_rows_that_get_logits() {
        let top = TopK { k: 4, n_vocab: 100 };
        let mut batch = Batch::default();
        batch.push(segment(0, Phase::Prompt, Want::All), &[1, 2]);
        batch.push(segment(1, Phase::Prompt, Want::None), &[3]);
        batch.push(segment(2, Phase::Decode, Want::LastBest(top)), &[4, 5, 6]);
        batch.push(segment(3, Phase::Prompt, Want::Last), &[7, 8]);
        let rows: Vec<_> = batch.logit_rows().collect();
        let row = |row, session, token, best| LogitRow { row, session, token, best };
        let wanted =
            [row(2, 2, 2, Some(top)), row(3, 0, 0, None), row(4, 0, 1, None), row(7, 3, 1, None)];
        assert_eq!(rows, wanted);
        let wanted = batch.wanted();
        assert_eq!(wanted.tokens(), [6, 1, 2, 8]);
        let segments: Vec<_> =
            wanted.segments().map(|(rows, s)| (s.session, s.past, rows)).collect();
        assert_eq!(segments, [(2, 9, 0..1), (0, 7, 1..3), (3, 8, 3..4)]);
    }

    #[test]
    #[should_panic(expected = "session 5 has a segment already")]
    fn a_text_has_one_segment() {
        let mut batch = Batch::one(segment(5, Phase::Decode, Want::Last), &[1]);
        batch.push(segment(5, Phase::Prompt, Want::Last), &[2]);
    }
}
