//! The k best logits of a vocabulary (`kernels/sample.cu`), so that not all logits are copied to
//! the host.

use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;

const THREADS: u32 = 256;
/// Logits or keys that a block takes.
const CHUNK: usize = 2048;

/// The largest k.
pub const TOP_K_MAX: usize = 256;

/// The id where a row has fewer than k.
pub const NO_TOKEN: u32 = u32::MAX;

kernel_params! {
    pub struct TopKParams[64] {
        from: DevicePtr,
        logits: DevicePtr,
        kept: DevicePtr,
        values: DevicePtr,
        ids: DevicePtr,
        n_keys: u32,
        n: u32,
        divisor: f32,
        k: u32,
        is_last: u32,
        unused: u32,
    }
}

kernels! {
    pub struct Sample {
        top_k_logits: TopKParams = "top_k_logits",
        top_k_keys: TopKParams = "top_k_keys",
    }
}

/// Logits f32 [rows, n_vocab], and scratch memory.
#[derive(Clone, Copy)]
pub struct Logits<'a> {
    pub data: DeviceSlice<'a>,
    pub n_vocab: usize,
    /// The logits are divided by this, which is above 0.
    pub divisor: f32,
    /// [`scratch_bytes`] of any content, on a multiple of 8 bytes.
    pub scratch: DeviceSlice<'a>,
}

impl Logits<'_> {
    fn rows(&self) -> usize {
        let all = self.data.count::<f32>();
        assert!(self.n_vocab > 0 && all.is_multiple_of(self.n_vocab), "rows of {}", self.n_vocab);
        all / self.n_vocab
    }
}

/// The number of blocks for n logits or keys.
fn blocks(n: usize) -> usize {
    n.div_ceil(CHUNK)
}

/// The scratch memory for the `k` best of `rows` rows.
pub fn scratch_bytes(n_vocab: usize, rows: usize, k: usize) -> usize {
    // Two buffers for the keys that a launch keeps; the first launch keeps the most.
    2 * 8 * rows * blocks(n_vocab) * k
}

impl Sample {
    /// The `k` best of each row, by descending logit and then ascending id: `values` f32 and `ids`
    /// u32, both [rows, k]. NaN and +∞ are equals above every number, so the first of a row is the
    /// first of them if there is any. Where a row has fewer than `k`, −∞ and [`NO_TOKEN`] follow.
    ///
    /// # Panics
    /// If `k` is 0 or more than [`TOP_K_MAX`], or sizes do not fit each other.
    pub fn top_k(
        &self,
        stream: &Stream,
        logits: Logits,
        k: usize,
        values: DeviceSlice,
        ids: DeviceSlice,
    ) -> Result<()> {
        let (rows, n) = (logits.rows(), logits.n_vocab);
        assert!((1..=TOP_K_MAX).contains(&k), "the {k} best");
        assert_eq!([values.count::<f32>(), ids.count::<u32>()], [rows * k; 2]);
        assert!(logits.scratch.holds::<u64>(scratch_bytes(n, rows, k) / 8), "scratch");
        if rows == 0 {
            return Ok(());
        }
        let place = 8 * rows * blocks(n) * k;
        let mut from = logits.scratch.slice(place..2 * place);
        let mut kept = logits.scratch.slice(0..place);
        let mut n_keys = n;
        for launch in 0.. {
            let blocks = blocks(n_keys);
            let kernel = if launch == 0 { self.top_k_logits } else { self.top_k_keys };
            let params = TopKParams {
                from: from.into(),
                logits: logits.data.into(),
                kept: kept.into(),
                values: values.into(),
                ids: ids.into(),
                n_keys: u32_of(n_keys),
                n: u32_of(n),
                divisor: logits.divisor,
                k: u32_of(k),
                is_last: (blocks == 1).into(),
                unused: 0,
            };
            let grid = Grid::new([u32_of(blocks), u32_of(rows), 1], THREADS);
            // SAFETY: the sizes are checked above.
            unsafe { stream.launch(kernel, grid, &params)? };
            if blocks == 1 {
                break;
            }
            n_keys = blocks * k;
            std::mem::swap(&mut from, &mut kept);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Later launches keep no more than the first, so the buffers are large enough for them.
    #[test]
    fn what_is_kept_becomes_less() {
        for k in [1, 40, TOP_K_MAX] {
            let mut n_keys = 1 << 20;
            while blocks(n_keys) > 1 {
                let kept = blocks(n_keys) * k;
                assert!(kept < n_keys, "{kept} of {n_keys}");
                n_keys = kept;
            }
        }
        // 2049 keys of which two blocks keep 256 each.
        assert_eq!(scratch_bytes(2049, 3, 256), 3 * 2 * 8 * 512);
    }
}
