//! Rotary position embedding (`kernels/rope.cu`); twin in `cpu::rope`, whose table it reads.

use super::{Args, Device, DeviceSlice, Kernel, Launch, Stream};
use crate::Result;
use crate::backend::ops::{RopePairing, RopeShape};

const THREADS: u32 = 128;

pub struct Rope(Kernel);

/// Cosines and sines of some positions: f32 [positions, pairs, (cos, sin)], as
/// `cpu::rope::RopeTable` has them.
#[derive(Clone, Copy)]
pub struct DeviceTurns<'a> {
    pub turns: DeviceSlice<'a>,
    pub n_pairs: usize,
}

impl Rope {
    pub fn load(gpu: &Device) -> Result<Rope> {
        Ok(Rope(gpu.kernel("rope")?))
    }

    /// Turns elements of each head of `x` f32 [tokens, heads, head_dim] in place; token t by row
    /// `rows[t]` (u32) of the table.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `rows` are below the table's positions.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        shape: RopeShape,
        table: DeviceTurns,
        rows: DeviceSlice,
    ) -> Result<()> {
        let (n, tokens, pairs) = (x.count::<f32>(), rows.count::<u32>(), table.n_pairs);
        if n == 0 || pairs == 0 {
            return Ok(());
        }
        assert!(n.is_multiple_of(tokens * shape.head_dim), "{n} in {tokens} tokens");
        assert!(shape.offset + 2 * pairs <= shape.head_dim);
        assert!(table.turns.address().is_multiple_of(8), "a pair is one load");
        let heads = n / tokens / shape.head_dim;
        let adjacent = u32::from(shape.pairing == RopePairing::Adjacent);
        let args = Args::new().slice(x).slice(table.turns).slice(rows).size(tokens).size(heads);
        let args = args.size(shape.head_dim).size(shape.offset).size(pairs).u32(adjacent);
        // SAFETY: the arguments are the kernel's; sizes are asserted, rows the caller's promise.
        unsafe { stream.launch(&Launch::each(self.0, tokens * heads * pairs, THREADS, &args)) }
    }
}
