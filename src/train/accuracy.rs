//! How well a layer's choices are predicted (PreScope, Figure 16 and Table 3), by LLaPor and by
//! what it has to beat.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::Task;
use super::features::Source;
use crate::policy::papers::prescope::llapor::{Group, LayerModel, Workspace};

/// Tokens that are decoded at once in Table 3.
const BATCH: usize = 32;

/// "Second-order sliding window": the hottest n count as found among the hottest n + 2.
const WINDOW: usize = 2;

#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Tokens at the end of the samples that nothing was trained on.
    pub n_held_out: usize,
    /// Predicted from the MoE layer before, and from the one before that.
    pub layers: Vec<LayerReport>,
    pub second: Vec<LayerReport>,
}

#[derive(Clone, Debug)]
pub struct LayerReport {
    pub layer: usize,
    pub group: Group,
    /// Held-out tokens that it was judged by.
    pub n_tokens: usize,
    pub llapor: Accuracy,
    /// The layer's router on the earlier layer's activation, where the samples have it.
    pub gate: Option<Accuracy>,
    /// The experts that were most frequent in training.
    pub statistics: Accuracy,
    pub times: Times,
}

/// Time that LLaPor took on this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// All epochs, and the compression.
    pub training: Duration,
    /// One prediction, the mean.
    pub prediction: Duration,
}

/// Shares, from 0 to 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Accuracy {
    /// At i: the share of a token's i + 1 heaviest experts among the k predicted ones; the last
    /// is the hit rate of Figure 16.
    pub top: Vec<f64>,
    pub hot: Hot,
}

/// Over batches of tokens, of experts by how many tokens choose them: Table 3.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hot {
    /// The share of the 2, 3 and 4 experts predicted hottest that are within the window.
    pub top: [f64; 3],
    /// Tokens of the 4 that were predicted to be hottest, in parts of those of the 4 that are.
    pub tokens: f64,
}

/// Trained on some rows in a time, judged by others.
pub fn judge(
    task: &Task<'_>,
    (model, training): (&LayerModel, Duration),
    trained: Range<usize>,
    held_out: Range<usize>,
) -> LayerReport {
    let source = task.source();
    let (n_experts, k) = (task.n_experts(), source.k);
    let target = &task.samples.layers[task.at];
    let pairs: Vec<(usize, usize)> = source.pairs(held_out).collect();
    let chosen = |row: usize| &target.chosen[row * k..][..k];
    let truth: Vec<&[u32]> = pairs.iter().map(|(_, to)| chosen(*to)).collect();
    let measure = |scores: Vec<f32>| accuracy(&truth, &scores, n_experts, k);

    let mut counts = vec![0.0; n_experts];
    target.chosen[trained.start * k..trained.end * k]
        .iter()
        .for_each(|expert| counts[*expert as usize] += 1.0);
    // Recorded of the next layer's router alone.
    let ahead = source.layer.ahead.as_ref().filter(|_| task.distance == 1);
    let gate = ahead.map(|ahead| {
        let rows = pairs.iter().map(|(from, _)| &ahead[from * n_experts..][..n_experts]);
        measure(rows.flatten().copied().collect())
    });
    let start = Instant::now();
    let predicted = logits(&source, model, &pairs);
    let prediction = start.elapsed() / pairs.len().max(1) as u32;
    LayerReport {
        layer: task.layer,
        group: task.group,
        n_tokens: pairs.len(),
        llapor: measure(predicted),
        gate,
        statistics: measure(counts.repeat(pairs.len())),
        times: Times { training, prediction },
    }
}

/// [n, n_experts]
fn logits(source: &Source<'_>, model: &LayerModel, pairs: &[(usize, usize)]) -> Vec<f32> {
    let mut work = Workspace::default();
    let mut out = Vec::with_capacity(pairs.len() * model.n_experts());
    for &(from, _) in pairs {
        model.forward(source.hidden(from), source.chosen(from), source.probs(from), &mut work);
        out.extend_from_slice(&work.logits);
    }
    out
}

/// The ids of the `n` greatest, greatest first; of equals the lower id first.
fn best(scores: &[f32], n: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
    order.truncate(n);
    order
}

fn hits(wanted: &[u32], among: &[u32]) -> usize {
    wanted.iter().filter(|expert| among.contains(expert)).count()
}

/// `truth` has each token's k experts, best first; `scores`: [n, n_experts].
fn accuracy(truth: &[&[u32]], scores: &[f32], n_experts: usize, k: usize) -> Accuracy {
    let predicted: Vec<Vec<u32>> =
        scores.chunks_exact(n_experts).map(|scores| best(scores, k)).collect();
    let n = truth.len().max(1) as f64;
    let mut top = vec![0.0; k];
    for (truth, predicted) in truth.iter().zip(&predicted) {
        for (at, top) in top.iter_mut().enumerate() {
            *top += hits(&truth[..=at], predicted) as f64 / (at + 1) as f64 / n;
        }
    }
    Accuracy { top, hot: hot(truth, &predicted, n_experts) }
}

/// Tokens of a batch are far apart, as if each were of another text.
fn hot(truth: &[&[u32]], predicted: &[Vec<u32>], n_experts: usize) -> Hot {
    let n_batches = truth.len() / BATCH;
    let mut hot = Hot::default();
    for batch in 0..n_batches {
        let (mut real, mut guess) = (vec![0.0; n_experts], vec![0.0; n_experts]);
        for token in (0..BATCH).map(|at| batch + at * n_batches) {
            truth[token].iter().for_each(|expert| real[*expert as usize] += 1.0);
            // A lower predicted weight decides between equals.
            for (at, expert) in predicted[token].iter().enumerate() {
                guess[*expert as usize] += 1.0 - 1e-4 * at as f32;
            }
        }
        let n = n_batches as f64;
        for (top, n_hot) in hot.top.iter_mut().zip(2..) {
            let n_hot = n_hot.min(n_experts);
            let found = hits(&best(&guess, n_hot), &best(&real, n_hot + WINDOW));
            *top += found as f64 / n_hot as f64 / n;
        }
        let tokens =
            |list: Vec<u32>| list.iter().map(|e| f64::from(real[*e as usize])).sum::<f64>();
        hot.tokens += tokens(best(&guess, 4)) / tokens(best(&real, 4)) / n;
    }
    hot
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_counts_by_its_best_experts() {
        // Predicted are 0 and 1, then 2 and 0.
        let scores = [0.5, 0.4, 0.1, 0.0, 0.2, 0.1, 0.6, 0.1];
        let found = accuracy(&[&[1, 3], &[0, 2]], &scores, 4, 2);
        assert_eq!(found.top, [1.0, 0.75]);
        assert_eq!(found.hot, Hot::default(), "there is no whole batch");
        assert_eq!(accuracy(&[&[3, 1], &[1, 3]], &scores, 4, 2).top, [0.0, 0.25]);
    }

    /// With 8 experts, token i has i mod 8 and one of 0 and 1, so these two are hottest, with 20
    /// tokens each; all others have 4.
    #[test]
    fn hot_experts_are_found_within_the_window() {
        let tokens: Vec<[u32; 2]> = (0..32).map(|i| [i % 8, (i + 1) % 2]).collect();
        let truth: Vec<&[u32]> = tokens.iter().map(|token| &token[..]).collect();
        let exact: Vec<Vec<u32>> = truth.iter().map(|token| token.to_vec()).collect();
        let right = hot(&truth, &exact, 8);
        assert_eq!((right.top, right.tokens), ([1.0; 3], 1.0));
        // Of 4 and 5 for everyone neither is among the true 4 best, 0 to 3, and both are of the
        // best 6; then come 0 and 1, as of equals the lower id goes first.
        let wrong = hot(&truth, &vec![vec![4, 5]; 32], 8);
        assert_eq!(wrong.top, [0.0, 2.0 / 3.0, 1.0]);
        assert_eq!(wrong.tokens, 1.0);
        let cold = hot(&truth, &vec![vec![6, 7]; 32], 8);
        assert_eq!(cold.top, [0.0, 1.0 / 3.0, 0.5]);
    }
}
