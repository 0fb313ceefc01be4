//! The best of a vocabulary on the device (`kernels/sample.cu`): what a sampler needs is a few
//! numbers, not all logits.

use super::{Args, Device, DeviceSlice, Kernel, Launch, Stream};
use crate::Result;

const THREADS: u32 = 256;
/// Logits or keys that a block takes.
const CHUNK: usize = 2048;

/// As many as can be kept.
pub const TOP_K_MAX: usize = 256;

/// In place of an id where there is none.
pub const NO_TOKEN: u32 = u32::MAX;

pub struct Sample {
    top_k_logits: Kernel,
    top_k_keys: Kernel,
}

/// Logits f32 [rows, n_vocab], and room that a choice among them takes.
#[derive(Clone, Copy)]
pub struct Logits<'a> {
    pub data: DeviceSlice<'a>,
    pub n_vocab: usize,
    /// Above 0; what they are divided by first.
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

/// Blocks that n logits or keys take.
fn blocks(n: usize) -> usize {
    n.div_ceil(CHUNK)
}

/// Room for the `k` best of `rows` rows.
pub fn scratch_bytes(n_vocab: usize, rows: usize, k: usize) -> usize {
    // Two places for what a launch keeps; the first launch keeps the most.
    2 * 8 * rows * blocks(n_vocab) * k
}

impl Sample {
    pub fn load(gpu: &Device) -> Result<Sample> {
        Ok(Sample {
            top_k_logits: gpu.kernel("top_k_logits")?,
            top_k_keys: gpu.kernel("top_k_keys")?,
        })
    }

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
        assert!(logits.scratch.holds::<u64>(scratch_bytes(n, rows, k) / 8), "room");
        if rows == 0 {
            return Ok(());
        }
        let place = 8 * rows * blocks(n) * k;
        let mut from = logits.scratch.slice(place..2 * place);
        let mut kept = logits.scratch.slice(0..place);
        let mut n_keys = n;
        for launch in 0.. {
            let blocks = blocks(n_keys);
            let (kernel, args) = match launch {
                0 => (self.top_k_logits, Args::new()),
                _ => (self.top_k_keys, Args::new().slice(from).size(n_keys)),
            };
            let args = args.slice(logits.data).size(n).f32(logits.divisor).size(k);
            let args = args.u32(u32::from(blocks == 1));
            let args = args.slice(kept).slice(values).slice(ids);
            let (grid, block) = ([blocks as u32, rows as u32, 1], [THREADS, 1, 1]);
            let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
            // SAFETY: the arguments are the kernel's, and the sizes are checked above.
            unsafe { stream.launch(&launch)? };
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

    /// Later launches keep no more than the first, so the places are large enough for them.
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
