//! Sines and cosines of positions, added to embeddings: sines in the first half, cosines in the
//! second, with wavelengths from 2π to 10000 · 2π (tensor2tensor, and fairseq after it; Vaswani et
//! al. 2017, section 3.5, has them interleaved).

/// Adds those of positions `first..` to the rows of `x` [tokens, n_embd].
pub fn add_sinusoids(x: &mut [f32], n_embd: usize, first: usize) {
    let half = n_embd / 2;
    // Rounded to f32 where the reference does, so that angles are the same.
    let step = (10000f64.ln() / (half - 1) as f64) as f32;
    let frequency = |i: usize| (i as f32 * -step).exp();
    for i in 0..half {
        let frequency = frequency(i);
        for (t, x) in x.chunks_exact_mut(n_embd).enumerate() {
            let angle = f64::from((first + t) as f32 * frequency);
            x[i] += angle.sin() as f32;
            x[half + i] += angle.cos() as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `NllbMoeSinusoidalPositionalEmbedding.get_embedding(1003, 6)` of transformers
    /// 4.46.
    #[test]
    fn sinusoids_are_the_reference_s() {
        let known = [
            (0, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
            (1, [0.8414710, 0.0099998, 0.0001000, 0.5403023, 0.9999500, 1.0]),
            (7, [0.6569866, 0.0699428, 0.0007000, 0.7539023, 0.9975510, 0.9999998]),
            (1002, [0.1672665, -0.5606922, 0.1000324, -0.9859117, -0.8280243, 0.9949841]),
        ];
        for (position, row) in known {
            let mut x = [1.0; 6];
            add_sinusoids(&mut x, 6, position);
            for (x, known) in x.iter().zip(row) {
                assert!((x - 1.0 - known).abs() < 2e-6, "{position}: {} for {known}", x - 1.0);
            }
        }
    }
}
