//! Rows of a table of embeddings (`kernels/embed.cu`).

use super::mat::{DeviceMat, TypeKernels, types};
use super::{Args, Device, DeviceSlice, Launch, Stream};
use crate::Result;
use crate::gguf::TensorType;

const THREADS: u32 = 128;

pub struct Embed(TypeKernels);

/// Values that a thread writes.
fn values(ty: TensorType) -> usize {
    match ty.block_len() {
        1 => 1,
        256 => 64,
        64 => 16,
        len => len,
    }
}

impl Embed {
    pub fn load(gpu: &Device) -> Result<Embed> {
        Ok(Embed(TypeKernels::load(gpu, "embed", types())?))
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
        let args = Args::new().slice(table.data).slice(ids).size(table.cols).slice(out);
        let threads = (table.cols / values(table.ty)) as u32;
        let grid = [threads.div_ceil(THREADS), n_tokens as u32, 1];
        let (kernel, block) = (self.0.get(table.ty), [THREADS, 1, 1]);
        let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's; sizes are asserted, ids the caller's promise.
        unsafe { stream.launch(&launch) }
    }
}
