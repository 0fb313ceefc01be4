//! Rotary position embedding (`kernels/rope.cu`). Twin: `cpu::rope`, whose table it reads.

use super::{Device, DevicePtr, DeviceSlice, Grid, Kernel, Stream, kernel_params, u32_of};
use crate::Result;
use crate::backend::ops::{RopePairing, RopeShape};

const THREADS: u32 = 128;

kernel_params! {
    pub struct RopeParams[56] {
        x: DevicePtr,
        cos_sin: DevicePtr,
        rows: DevicePtr,
        tokens: u32,
        heads: u32,
        head_dim: u32,
        offset: u32,
        pairs: u32,
        adjacent: u32,
        sign: f32,
        unused: u32,
    }
}

pub struct Rope(Kernel<RopeParams>);

/// Cosines and sines of some positions: f32 [positions, pairs, (cos, sin)], as
/// `cpu::rope::RopeTable` has them.
#[derive(Clone, Copy)]
pub struct DeviceCosSin<'a> {
    pub data: DeviceSlice<'a>,
    pub n_pairs: usize,
    /// Elements are turned back.
    pub back: bool,
}

impl Rope {
    pub fn load(gpu: &Device) -> Result<Rope> {
        Ok(Rope(Kernel::find(gpu, "rope")?))
    }

    /// Rotates elements of each head of `x` f32 [tokens, heads, head_dim] in place; token t by row
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
        table: DeviceCosSin,
        rows: DeviceSlice,
    ) -> Result<()> {
        let (n, tokens, pairs) = (x.count::<f32>(), rows.count::<u32>(), table.n_pairs);
        if n == 0 || pairs == 0 {
            return Ok(());
        }
        assert!(n.is_multiple_of(tokens * shape.head_dim), "{n} in {tokens} tokens");
        assert!(shape.offset + 2 * pairs <= shape.head_dim);
        assert!(table.data.address().is_multiple_of(8), "a pair is one load");
        let heads = n / tokens / shape.head_dim;
        let adjacent = u32::from(shape.pairing == RopePairing::Adjacent);
        let params = RopeParams {
            x: x.into(),
            cos_sin: table.data.into(),
            rows: rows.into(),
            tokens: u32_of(tokens),
            heads: u32_of(heads),
            head_dim: u32_of(shape.head_dim),
            offset: u32_of(shape.offset),
            pairs: u32_of(pairs),
            adjacent,
            sign: if table.back { -1.0 } else { 1.0 },
            unused: 0,
        };
        // SAFETY: sizes are asserted; the rows are the caller's promise.
        unsafe { stream.launch(self.0, Grid::each(tokens * heads * pairs, THREADS), &params) }
    }
}
