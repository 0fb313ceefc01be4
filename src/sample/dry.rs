//! DRY, "don't repeat yourself": a token that would continue a repetition is penalised the more,
//! the longer the repetition is
//! (<https://github.com/oobabooga/text-generation-webui/pull/5677>).

use super::breakers::Breakers;
use super::candidates::{Candidates, Stage, finite};
use super::math::{ln, power};
use std::collections::{HashMap, VecDeque};

#[derive(Clone, Debug, PartialEq)]
pub struct DryOptions {
    /// The penalty of a repetition of `allowed_length`; 0: none.
    pub multiplier: f32,
    /// The factor on the penalty for each token more.
    pub base: f32,
    pub allowed_length: i32,
    /// How many tokens back repetitions are looked for; −1: all, 0: none.
    pub last_n: i32,
    /// Strings that a repetition does not cross.
    pub breakers: Vec<String>,
}

impl Default for DryOptions {
    fn default() -> Self {
        let breakers = ["\n", ":", "\"", "*"].map(String::from).into();
        Self { multiplier: 0.0, base: 1.75, allowed_length: 2, last_n: 64, breakers }
    }
}

pub struct Dry {
    options: DryOptions,
    breakers: Breakers,
    /// The newest first.
    recent: VecDeque<u32>,
}

impl Dry {
    pub fn new(options: &DryOptions, breakers: Breakers) -> Self {
        Self { options: options.clone(), breakers, recent: VecDeque::new() }
    }

    /// Tokens that would continue a repetition, and the length of the longest one.
    fn repetitions(&mut self) -> HashMap<u32, i64> {
        let mut longest = HashMap::new();
        let allowed = i64::from(self.options.allowed_length);
        let text: &[u32] = self.recent.make_contiguous();
        let limit = self.breakers.limit(text) as i64;
        if text.len() as i64 <= allowed || limit < allowed {
            return longest;
        }
        for (at, length) in common_prefixes(text).into_iter().enumerate().skip(1) {
            let length = (length as i64).min(limit);
            // What came after the earlier occurrence would continue it.
            let next = text[at - 1];
            if length >= allowed && !self.breakers.is_one(next) {
                let longest = longest.entry(next).or_insert(length);
                *longest = length.max(*longest);
            }
        }
        longest
    }

    fn penalty(&self, length: i64) -> f32 {
        let base = f64::from(self.options.base);
        let longer = (length - i64::from(self.options.allowed_length)) as f64;
        // As far as an f32 holds the power.
        let most = if base > 1.000_001 { (88.722_84 / ln(base)).floor() } else { f64::MAX };
        finite((f64::from(self.options.multiplier) * power(base, longer.min(most))) as f32)
    }
}

impl Stage for Dry {
    fn apply(&mut self, candidates: &mut Candidates) {
        let repetitions = self.repetitions();
        let ids = repetitions.keys().copied();
        candidates.change(ids, |id, logit| logit - self.penalty(repetitions[&id]));
    }

    fn accept(&mut self, id: u32) {
        self.recent.push_front(id);
        if let Ok(size) = usize::try_from(self.options.last_n) {
            self.recent.truncate(size);
        }
    }
}

/// For each place of a text, how much from there on is as its beginning (the Z function).
fn common_prefixes(text: &[u32]) -> Vec<usize> {
    let mut lengths = vec![0; text.len()];
    // The part that reached furthest: text[from..to] is as text[..to − from].
    let (mut from, mut to) = (0, 0);
    for at in 1..text.len() {
        let known = if at < to { lengths[at - from].min(to - at) } else { 0 };
        let more = text[known..].iter().zip(&text[at + known..]).take_while(|(a, b)| a == b);
        lengths[at] = known + more.count();
        if at + lengths[at] > to {
            (from, to) = (at, at + lengths[at]);
        }
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::super::candidates::testing::{after, assert_near, of};
    use super::*;
    use proptest::prelude::*;

    fn dry(options: DryOptions, breakers: Breakers, text: &[u32]) -> Dry {
        let mut stage = Dry::new(&options, breakers);
        text.iter().for_each(|&id| stage.accept(id));
        stage
    }

    /// The figures of llama.cpp's tests: (text, multiplier, allowed length, breakers, result).
    #[test]
    fn probabilities_are_llama_cpps() {
        let (quarters, fifths): (&[f32], &[f32]) = (&[0.25; 4], &[0.2; 5]);
        let cases: [(&[u32], f32, i32, &[u32], &[f64]); 5] = [
            (&[0, 1], 1.0, 2, &[], &[0.25; 4]),
            (&[0, 1, 2, 0, 1], 1.0, 2, &[], &[0.296923, 0.296923, 0.109232, 0.296923]),
            (&[0, 1, 3, 4, 0, 1], 1.0, 2, &[3], &[0.2; 5]),
            (&[0, 1, 2, 0, 1], 2.0, 2, &[], &[0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
            (&[0, 1, 2, 3, 4, 0, 1], 1.0, 4, &[], &[0.2; 5]),
        ];
        for (text, multiplier, allowed_length, breakers, expected) in cases {
            let last_n = text.len() as i32;
            let options = DryOptions {
                multiplier,
                base: 1.1,
                allowed_length,
                last_n,
                ..DryOptions::default()
            };
            let mut stage = dry(options, Breakers::tokens(breakers), text);
            let start = if expected.len() == 4 { quarters } else { fifths };
            let expected: Vec<_> = (0..).zip(expected.iter().copied()).collect();
            assert_near(&after(of(start), &mut stage), &expected);
        }
    }

    fn repeated(allowed_length: i32, breakers: Breakers, text: &[u32]) -> Vec<(u32, i64)> {
        let o = DryOptions { multiplier: 1.0, allowed_length, last_n: -1, ..DryOptions::default() };
        let mut found: Vec<_> = dry(o, breakers, text).repetitions().into_iter().collect();
        found.sort_unstable();
        found
    }

    /// a b c c b c y a b c: the last three came before a c, the last two before y, the last before
    /// b and c.
    #[test]
    fn the_longest_repetition_counts() {
        let text = [1, 2, 3, 3, 2, 3, 25, 1, 2, 3];
        assert_eq!(repeated(1, Breakers::default(), &text), [(2, 1), (3, 3), (25, 2)]);
        assert_eq!(repeated(2, Breakers::default(), &text), [(3, 3), (25, 2)]);
        assert_eq!(repeated(4, Breakers::default(), &text), []);
    }

    #[test]
    fn a_breaker_ends_repetitions_and_is_never_penalised() {
        let text = [1, 2, 3, 9, 1, 2, 3];
        assert_eq!(repeated(2, Breakers::default(), &text), [(9, 3)]);
        assert_eq!(repeated(2, Breakers::tokens(&[9]), &text), []);
        assert_eq!(repeated(2, Breakers::tokens(&[2]), &text), [], "one token since the breaker");
        assert_eq!(repeated(1, Breakers::tokens(&[2]), &text), [(9, 1)]);
    }

    #[test]
    fn the_penalty_grows_with_the_length_and_stays_finite() {
        let o = DryOptions { multiplier: 0.5, base: 2.0, ..DryOptions::default() };
        let stage = dry(o, Breakers::default(), &[]);
        assert_eq!([2, 3, 5].map(|n| stage.penalty(n)), [0.5, 1.0, 4.0]);
        let o = DryOptions { multiplier: 1e6, base: 1e6, ..DryOptions::default() };
        assert!(dry(o, Breakers::default(), &[]).penalty(1_000_000).is_finite());
    }

    #[test]
    fn the_window_forgets() {
        let text = [1, 2, 3, 4, 5, 6, 1, 2];
        let with = |last_n| {
            let o = DryOptions { multiplier: 1.0, last_n, ..DryOptions::default() };
            dry(o, Breakers::default(), &text).repetitions().len()
        };
        assert_eq!([with(8), with(-1), with(7)], [1, 1, 0]);
    }

    proptest! {
        #[test]
        fn prefixes_are_as_compared_one_by_one(
            text in prop::collection::vec(0u32..3, 0..60),
        ) {
            let lengths = common_prefixes(&text);
            for at in 1..text.len() {
                let same = text.iter().zip(&text[at..]).take_while(|(a, b)| a == b).count();
                prop_assert_eq!(lengths[at], same);
            }
        }
    }
}
