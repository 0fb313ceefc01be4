//! Prompt lookup: the tokens that followed the text's last ones where these stood before.

use std::collections::HashMap;

use super::{Draft, DraftKind, DraftSource};

/// Tokens that must be the same before a draft.
const MIN_MATCH: usize = 3;

/// Tokens that are compared at most: more say nothing new.
const MAX_MATCH: usize = 64;

/// Earlier places that are looked at, the latest first.
const MAX_PLACES: usize = 16;

/// Stands between the prediction and the text; no model has as many tokens.
const BOUNDARY: u32 = u32::MAX;

/// An index of a text, and of a prediction of its end, by runs of [`MIN_MATCH`] tokens.
pub struct Lookup {
    /// The prediction, a boundary and the text.
    tokens: Vec<u32>,
    n_prediction: usize,
    /// The place of the prediction that the answer has come to, while it follows it from its
    /// beginning.
    cursor: Option<usize>,
    /// For each run the latest place behind it, and for each place the one before it with the
    /// same run; 0 is none.
    latest: HashMap<[u32; MIN_MATCH], u32>,
    earlier: Vec<u32>,
}

/// A place whose tokens may come next.
struct Place {
    at: usize,
    n_matched: usize,
}

impl Lookup {
    pub fn new(prediction: &[u32]) -> Lookup {
        let mut lookup = Lookup {
            tokens: Vec::new(),
            n_prediction: prediction.len(),
            cursor: (!prediction.is_empty()).then_some(0),
            latest: HashMap::new(),
            earlier: vec![0],
        };
        prediction.iter().for_each(|&id| lookup.push(id));
        lookup.push(BOUNDARY);
        lookup
    }

    /// Reads what is new of a text that begins with those of earlier calls and whose first
    /// `n_prompt` tokens are no part of the answer.
    pub fn follow(&mut self, text: &[u32], n_prompt: usize) {
        let n_known = self.tokens.len() - self.n_prediction - 1;
        for (i, &id) in text.iter().enumerate().skip(n_known) {
            if i >= n_prompt {
                let next = self.cursor.filter(|at| self.tokens[*at] == id).map(|at| at + 1);
                self.cursor = next.filter(|at| *at < self.n_prediction);
            }
            self.push(id);
        }
    }

    fn push(&mut self, id: u32) {
        self.tokens.push(id);
        let before = match self.last_run().filter(|run| !run.contains(&BOUNDARY)) {
            Some(run) => self.latest.insert(run, self.tokens.len() as u32).unwrap_or(0),
            None => 0,
        };
        self.earlier.push(before);
    }

    fn last_run(&self) -> Option<[u32; MIN_MATCH]> {
        self.tokens.last_chunk().copied()
    }

    /// At most `most` tokens that may come next; none if the text's last tokens are new.
    pub fn draft(&self, most: usize) -> Draft {
        let Some(Place { at, n_matched }) = self.place() else { return Draft::default() };
        let is_predicted = at < self.n_prediction;
        let source = if is_predicted { DraftSource::Prediction } else { DraftSource::Text };
        let mut tokens: Vec<u32> = Vec::with_capacity(most);
        for at in (at..).take(most) {
            // The draft itself follows the text's end.
            let id = self.tokens.get(at).copied();
            match id.unwrap_or_else(|| tokens[at - self.tokens.len()]) {
                BOUNDARY => break,
                id => tokens.push(id),
            }
        }
        Draft { tokens, kind: Some(DraftKind { source, n_matched }) }
    }

    /// The place with the longest match, the latest among equals.
    fn place(&self) -> Option<Place> {
        if let Some(at) = self.cursor {
            return Some(Place { at, n_matched: at });
        }
        let end = self.tokens.len();
        let mut best: Option<Place> = None;
        let mut at = self.earlier[end] as usize;
        for _ in 0..MAX_PLACES {
            if at == 0 {
                break;
            }
            let n_matched = if self.tokens[at] == BOUNDARY { 0 } else { self.n_matched(at) };
            if n_matched > 0 && best.as_ref().is_none_or(|best| n_matched > best.n_matched) {
                best = Some(Place { at, n_matched });
            }
            at = self.earlier[at] as usize;
        }
        best
    }

    /// Tokens before a place that are those before the text's end.
    fn n_matched(&self, at: usize) -> usize {
        let (before, last) = (self.tokens[..at].iter().rev(), self.tokens.iter().rev());
        let same = before.zip(last).take(MAX_MATCH);
        same.take_while(|(a, b)| a == b && **a != BOUNDARY).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafted(prediction: &[u32], text: &[u32], n_prompt: usize) -> (Vec<u32>, Option<DraftKind>) {
        let mut lookup = Lookup::new(prediction);
        // In two steps, as a text grows.
        lookup.follow(&text[..text.len() / 2], n_prompt);
        lookup.follow(text, n_prompt);
        let Draft { tokens, kind } = lookup.draft(4);
        (tokens, kind)
    }

    fn kind(source: DraftSource, n_matched: usize) -> Option<DraftKind> {
        Some(DraftKind { source, n_matched })
    }

    #[test]
    fn the_longest_match_is_continued() {
        let text = [7, 1, 2, 3, 4, 5, 6, 9, 2, 3, 4, 8, 8, 1, 2, 3, 4];
        assert_eq!(
            drafted(&[], &text, 17),
            (vec![5, 6, 9, 2], kind(DraftSource::Text, 4)),
            "four tokens match at the first place, three at the second"
        );
        assert_eq!(drafted(&[], &[1, 2, 3, 4], 4), (vec![], None));
        assert_eq!(drafted(&[], &[1], 1), (vec![], None));
    }

    #[test]
    fn a_loop_goes_on_beyond_the_text() {
        let text = [5, 1, 2, 1, 2, 1, 2];
        assert_eq!(drafted(&[], &text, 1), (vec![1, 2, 1, 2], kind(DraftSource::Text, 4)));
        let text = [5, 5, 5, 5];
        assert_eq!(drafted(&[], &text, 1), (vec![5, 5, 5, 5], kind(DraftSource::Text, 3)));
    }

    #[test]
    fn a_prediction_is_followed_from_its_beginning_and_found_again() {
        let prediction = [10, 11, 12, 13, 14, 15, 16, 17];
        let source = DraftSource::Prediction;
        assert_eq!(drafted(&prediction, &[1, 2], 2), (vec![10, 11, 12, 13], kind(source, 0)));
        let followed = drafted(&prediction, &[1, 2, 10, 11], 2);
        assert_eq!(followed, (vec![12, 13, 14, 15], kind(source, 2)));
        // Another token: the prediction counts again where three tokens are the same.
        assert_eq!(drafted(&prediction, &[1, 2, 10, 99, 12], 2), (vec![], None));
        let again = drafted(&prediction, &[1, 2, 10, 99, 12, 13, 14], 2);
        assert_eq!(again, (vec![15, 16, 17], kind(source, 3)), "it ends with the prediction");
        let over = [&[1, 2], &prediction[..]].concat();
        assert_eq!(drafted(&prediction, &over, 2), (vec![], None));
        // The prompt's tokens are no answer.
        assert_eq!(drafted(&prediction, &[10, 11], 2).0, [10, 11, 12, 13]);
    }
}
