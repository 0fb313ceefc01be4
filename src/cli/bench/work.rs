//! Arithmetic and cache reads of a test's tokens, by the model's shapes.

use super::super::args::SizeArgs;
use super::Test;
use crate::engine::Engine;

/// On average over a test's tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Multiplications and additions of all products, attention included.
    pub ops: f64,
    /// Keys and values that attention reads; counted where all tokens are decoded one by one, as
    /// those of a prompt share what they read.
    pub cache_bytes: Option<f64>,
}

impl Work {
    pub fn of(engine: &Engine, sizes: &SizeArgs, test: Test) -> Work {
        let (model, n_tokens) = (engine.model(), test.n_prompt + test.n_gen);
        let positions = || test.n_depth..test.n_depth + n_tokens;
        // A prompt's logits are of the last token of each batch.
        let n_heads = test.n_prompt.div_ceil(sizes.batch_size) + test.n_gen;
        let layers: u64 = positions().map(|at| model.token_macs(at)).sum();
        // So is the last layer's feed-forward part, if the others may be left out.
        let n_left_out = if model.may_leave_rows_out() { n_tokens - n_heads } else { 0 };
        let layers = layers - n_left_out as u64 * model.last_ffn_macs();
        let macs = layers + n_heads as u64 * model.head_macs();
        let (k, v) = (sizes.cache_type_k, sizes.cache_type_v);
        let read = || positions().map(|at| model.cache_bytes_read(at, k, v)).sum::<u64>();
        Work {
            ops: 2.0 * macs as f64 / n_tokens as f64,
            cache_bytes: (test.n_prompt == 0).then(|| read() as f64 / n_tokens as f64),
        }
    }
}
