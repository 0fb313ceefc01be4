//! Penalties on the logits of recent tokens.

use super::candidates::{Candidates, Stage, finite};
use super::options::SamplerOptions;
use std::collections::{HashMap, VecDeque};

pub struct Penalties {
    repeat: f32,
    presence: f32,
    frequency: f32,
    /// `None`: all tokens of the text are recent.
    size: Option<usize>,
    recent: VecDeque<u32>,
    counts: HashMap<u32, u32>,
}

impl Penalties {
    pub fn new(o: &SamplerOptions) -> Self {
        Self {
            repeat: o.repeat_penalty,
            presence: o.presence_penalty,
            frequency: o.frequency_penalty,
            size: usize::try_from(o.repeat_last_n).ok(),
            recent: VecDeque::new(),
            counts: HashMap::new(),
        }
    }

    fn penalised(&self, logit: f32, n: u32) -> f32 {
        // Dividing a negative logit would favour it.
        let logit = if logit > 0.0 { logit / self.repeat } else { logit * self.repeat };
        finite(logit) - finite(n as f32 * self.frequency + self.presence)
    }
}

impl Stage for Penalties {
    fn apply(&mut self, candidates: &mut Candidates) {
        let counts = &self.counts;
        candidates.change(counts.keys().copied(), |id, logit| self.penalised(logit, counts[&id]));
    }

    fn accept(&mut self, id: u32) {
        *self.counts.entry(id).or_insert(0) += 1;
        let Some(size) = self.size else { return };
        self.recent.push_back(id);
        if self.recent.len() > size
            && let Some(old) = self.recent.pop_front()
            && let Some(n) = self.counts.get_mut(&old)
        {
            *n -= 1;
            if *n == 0 {
                self.counts.remove(&old);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::testing::{after, assert_near, of};
    use super::*;

    fn penalties(options: SamplerOptions, accepted: &[u32]) -> Penalties {
        let mut stage = Penalties::new(&options);
        accepted.iter().for_each(|&id| stage.accept(id));
        stage
    }

    #[test]
    fn tokens_count_within_the_window() {
        let o = SamplerOptions {
            repeat_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            repeat_last_n: 3,
            ..SamplerOptions::default()
        };
        let after = |options: &SamplerOptions, ids: &[u32]| {
            let mut candidates = Candidates::new();
            candidates.fill(3, (0..).zip([4.0, -4.0, 1.0]));
            penalties(options.clone(), ids).apply(&mut candidates);
            candidates.list.iter().map(|c| c.logit).collect::<Vec<_>>()
        };
        assert_eq!(after(&o, &[]), [4.0, -4.0, 1.0]);
        assert_eq!(after(&o, &[0, 0, 1]), [2.0 - 1.0 - 0.25, -8.0 - 0.5 - 0.25, 1.0]);
        assert_eq!(after(&o, &[0, 0, 1, 1, 1]), [4.0, -8.0 - 1.5 - 0.25, 1.0]);
        assert_eq!(after(&o, &[0, 77, 77, 77]), [4.0, -4.0, 1.0], "unknown ids are ignored");
        let all = SamplerOptions { repeat_last_n: -1, ..o.clone() };
        assert_eq!(after(&all, &[0, 0, 1, 1, 1])[0], 2.0 - 1.0 - 0.25);
    }

    /// The figures of llama.cpp's tests.
    #[test]
    fn probabilities_are_llama_cpps() {
        let repeat = SamplerOptions { repeat_penalty: 50.0, ..SamplerOptions::default() };
        let other = SamplerOptions {
            frequency_penalty: 5.0,
            presence_penalty: 5.0,
            ..SamplerOptions::default()
        };
        let zero = 0.0;
        for (options, accepted, expected) in [
            (&repeat, &[0][..], [zero, 0.25, 0.25, 0.25, 0.25]),
            (&repeat, &[0, 1, 2], [zero, zero, zero, 0.5, 0.5]),
            (&repeat, &[0, 1, 2, 0, 0], [zero, zero, zero, 0.5, 0.5]),
            (&other, &[0], [0.000011, 0.249997, 0.249997, 0.249997, 0.249997]),
            (&other, &[0, 1, 2], [0.000023, 0.000023, 0.000023, 0.499966, 0.499966]),
            (&other, &[0, 1, 2, 0, 0], [zero, 0.000023, 0.000023, 0.499977, 0.499977]),
        ] {
            let mut stage = penalties(options.clone(), accepted);
            let got = after(of(&[0.2; 5]), &mut stage);
            assert_near(&got, &(0..).zip(expected).collect::<Vec<_>>());
        }
    }
}
