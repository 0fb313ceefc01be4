//! Rows of an embedding table (`kernels/embed.cu`).

use super::mat::{DeviceMat, TypeKernels, unit_len};
use super::{Device, DevicePtr, DeviceSlice, Grid, Stream, kernel_params, u32_of};
use crate::Result;
use crate::gguf::TensorType;

const THREADS: u32 = 128;

kernel_params! {
    pub struct EmbedParams[32] {
        table: DevicePtr,
        ids: DevicePtr,
        out: DevicePtr,
        cols: u32,
        unused: u32,
    }
}

pub struct Embed(TypeKernels<EmbedParams>);

/// The number of values that a thread writes.
fn values(ty: TensorType) -> usize {
    unit_len(ty).min(64)
}

impl Embed {
    /// For tables of these types.
    pub fn load(gpu: &Device, types: &[TensorType]) -> Result<Embed> {
        Ok(Embed(TypeKernels::load(gpu, "embed", types)?))
    }

    /// `out[t]`, f32 [n_tokens, table.cols], is row `ids[t]` of `table`; `ids` are u32.
    ///
    /// # Panics
    /// If sizes do not fit each other or rows have gaps.
    ///
    /// # Safety
    /// When the launch runs, `ids` are below `table.rows`.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        table: DeviceMat,
        ids: DeviceSlice,
        n_tokens: usize,
        out: DeviceSlice,
    ) -> Result<()> {
        assert!(table.is_dense(), "rows without gaps");
        assert!(ids.holds::<u32>(n_tokens) && out.holds::<f32>(n_tokens * table.cols));
        assert!(out.address().is_multiple_of(16), "values are written four at a time");
        if n_tokens == 0 || table.cols == 0 {
            return Ok(());
        }
        let (ids, out) = (ids.into(), out.into());
        let cols = u32_of(table.cols);
        let params = EmbedParams { table: table.data.into(), ids, out, cols, unused: 0 };
        let threads = u32_of(table.cols / values(table.ty));
        let grid = Grid::new([threads.div_ceil(THREADS), u32_of(n_tokens), 1], THREADS);
        // SAFETY: sizes are asserted; the ids are the caller's promise.
        unsafe { stream.launch(self.0.get(table.ty), grid, &params) }
    }
}
