//! Several rows made one: in each element the mean of theirs, weighed by the softmax of their
//! scores (DeepSeek-V4).

use super::Cpu;

/// A row and its scores, as long as the row.
#[derive(Clone, Copy, Debug)]
pub struct ScoredRow<'a> {
    pub values: &'a [f32],
    pub scores: &'a [f32],
}

impl Cpu {
    /// `out_i = Σ_r values_r,i · e^(scores_r,i − max_i) / Σ_r e^(scores_r,i − max_i)`, rows in
    /// their order, products and sums rounded. `room` is overwritten.
    pub fn compress_rows<'a>(
        &self,
        rows: impl Iterator<Item = ScoredRow<'a>> + Clone,
        room: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let n = out.len();
        room.clear();
        room.resize(3 * n, 0.0);
        let (max, rest) = room.split_at_mut(n);
        let (part, sum) = rest.split_at_mut(n);
        max.fill(f32::NEG_INFINITY);
        for row in rows.clone() {
            max.iter_mut().zip(row.scores).for_each(|(max, score)| *max = max.max(*score));
        }
        out.fill(0.0);
        for row in rows {
            part.iter_mut().zip(row.scores).zip(&*max).for_each(|((p, s), max)| *p = s - max);
            self.kernels.exp(part);
            self.kernels.add(sum, part);
            out.iter_mut().zip(row.values).zip(&*part).for_each(|((o, v), p)| *o += v * p);
        }
        out.iter_mut().zip(sum).for_each(|(o, sum)| *o /= *sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_is_a_mean_of_its_own() {
        let values = |seed: u32| -> Vec<f32> {
            (0..21).map(|i| ((i * 31 + seed * 17) % 23) as f32 / 5.0 - 2.0).collect()
        };
        let all: Vec<[Vec<f32>; 2]> = (0..5).map(|r| [values(r), values(r + 40)]).collect();
        let rows = all.iter().map(|[values, scores]| ScoredRow { values, scores });
        let mut out = vec![0.0; 21];
        Cpu::new(1).compress_rows(rows, &mut Vec::new(), &mut out);
        for (i, got) in out.iter().enumerate() {
            let weights: Vec<f64> = all.iter().map(|[_, s]| f64::from(s[i]).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mean: f64 = all.iter().zip(&weights).map(|([v, _], w)| f64::from(v[i]) * w).sum();
            assert!((f64::from(*got) - mean / sum).abs() < 1e-5, "{i}: {got}");
        }
    }
}
