//! How often tokens use each expert, of late: two exponentially decayed means. The short one sees
//! that a token's experts are likely to be the next token's; the long one sees who is used
//! throughout. A single use moves the long one by next to nothing, and what it moves the short one
//! is gone after some tokens.
//!
//! A token counts half by its choice and half by the router's probabilities, times k: an expert
//! that was nearly chosen is likely to be chosen soon.

use std::ops::Range;

/// Half-lives, tokens, and the weight of the short mean. The hits of the demo model and of its
/// sibling on prose (40 texts each, room for a quarter and for half of the experts) differ by less
/// than 0.3 points for half-lives of 3 to 8 and of 32 to 128, and for weights of 0.3 to 0.5.
const SHORT: f32 = 4.0;
const LONG: f32 = 64.0;
const SHORT_WEIGHT: f32 = 0.4;

/// The last tokens of a prompt that count: enough for it to be the text that is answered, few
/// enough to leave something of other texts.
pub(super) const PROMPT_TAIL: usize = 32;

#[derive(Clone, Debug)]
pub(super) struct Rates {
    /// Factors for one token.
    keep: [f32; 2],
    short: Vec<f32>, // [cells]
    long: Vec<f32>,  // [cells]
}

impl Rates {
    /// For so many experts; none has been used.
    pub fn new(n_cells: usize) -> Rates {
        let keep = [SHORT, LONG].map(|half_life| (-1.0 / half_life).exp2());
        Rates { keep, short: vec![0.0; n_cells], long: vec![0.0; n_cells] }
    }

    /// The rates of experts that had always been used so often.
    pub fn with(rates: Vec<f32>) -> Rates {
        Rates { short: rates.clone(), long: rates, ..Rates::new(0) }
    }

    /// A token has come to the layer that has the cells `row` and has chosen some of its experts.
    /// `probs`: of all of them, or empty if they are not known.
    pub fn observe(&mut self, row: Range<usize>, chosen: &[u32], probs: &[f32]) {
        let [short, long] = self.keep;
        let (shorts, longs) = (&mut self.short[row.clone()], &mut self.long[row]);
        shorts.iter_mut().for_each(|rate| *rate *= short);
        longs.iter_mut().for_each(|rate| *rate *= long);
        let sum: f32 = probs.iter().sum();
        let scale = chosen.len() as f32 / sum;
        let is_soft = probs.len() == shorts.len() && scale.is_finite() && scale > 0.0;
        let mut add = |expert: usize, used: f32| {
            if let (Some(s), Some(l)) = (shorts.get_mut(expert), longs.get_mut(expert)) {
                *s += (1.0 - short) * used;
                *l += (1.0 - long) * used;
            }
        };
        let weight = if is_soft { 0.5 } else { 1.0 };
        chosen.iter().for_each(|expert| add(*expert as usize, weight));
        if is_soft {
            let used = probs.iter().map(|prob| 0.5 * (prob * scale).clamp(0.0, 1.0));
            used.enumerate().for_each(|(expert, used)| add(expert, used));
        }
    }

    /// The last tokens of a prompt have come to a layer, of which each chose `k` experts.
    pub fn observe_tail(&mut self, row: Range<usize>, chosen: &[u32], k: usize) {
        tail(chosen, k).for_each(|chosen| self.observe(row.clone(), chosen, &[]));
    }

    /// The probability that a token uses the expert, from 0 to 1.
    pub fn rate(&self, cell: usize) -> f32 {
        SHORT_WEIGHT * self.short[cell] + (1.0 - SHORT_WEIGHT) * self.long[cell]
    }

    /// The mean of the experts' use over a long time.
    pub fn long(&self) -> &[f32] {
        &self.long
    }
}

/// The choices of a prompt's last tokens, in order.
pub(super) fn tail(chosen: &[u32], k: usize) -> impl ExactSizeIterator<Item = &[u32]> {
    let tokens = chosen.chunks_exact(k.max(1));
    let skipped = tokens.len().saturating_sub(PROMPT_TAIL);
    tokens.skip(skipped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expert_of_every_token_has_rate_1() {
        let mut rates = Rates::new(4);
        for _ in 0..2000 {
            rates.observe(1..4, &[1], &[0.0, 1.0, 0.0]);
        }
        let found: Vec<f32> = (0..4).map(|cell| rates.rate(cell)).collect();
        assert!((found[2] - 1.0).abs() < 1e-4, "{found:?}");
        assert_eq!((found[0], found[1], found[3]), (0.0, 0.0, 0.0));
    }

    #[test]
    fn nearly_chosen_experts_count_and_probabilities_of_any_scale_do() {
        let (mut soft, mut scaled, mut hard) = (Rates::new(3), Rates::new(3), Rates::new(3));
        soft.observe(0..3, &[0], &[0.5, 0.4, 0.1]);
        scaled.observe(0..3, &[0], &[5.0, 4.0, 1.0]);
        hard.observe(0..3, &[0], &[f32::NAN, 0.4, 0.1]);
        let all = |rates: &Rates| [0, 1, 2].map(|cell| rates.rate(cell));
        assert!(all(&soft)[0] > all(&soft)[1] && all(&soft)[1] > all(&soft)[2]);
        all(&soft).iter().zip(all(&scaled)).for_each(|(a, b)| assert!((a - b).abs() < 1e-6));
        assert!(all(&hard)[0] > all(&soft)[0] && all(&hard)[1..] == [0.0, 0.0]);
    }

    #[test]
    fn a_prompt_counts_by_its_last_tokens() {
        let mut rates = Rates::new(2);
        let prompt: Vec<u32> = (0..200).map(|token| u32::from(token < 100)).collect();
        rates.observe_tail(0..2, &prompt, 1);
        assert!(rates.rate(0) > 0.0 && rates.rate(1) == 0.0);
        // An id that is none of the layer's is no choice.
        rates.observe_tail(0..2, &[u32::MAX, 1], 2);
        assert!(rates.rate(1) > 0.0);
        assert_eq!(tail(&[0, 1, 2, 3], 2).collect::<Vec<_>>(), [[0, 1], [2, 3]]);
    }
}
