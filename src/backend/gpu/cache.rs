//! Rows of the KV cache on the device, and the kernels that store new ones (`kernels/cache.cu`).
//! Twins: `cpu::attention`.

use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::gguf::TensorType::{self, BF16, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

const THREADS: u32 = 128;

/// In the order of `CacheType` in `kernels/cache_rows.cuh`.
const TYPES: [TensorType; 9] = [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL];

/// Keys or values of one layer, as `cpu::attention::Rows`: [heads, n_ctx] rows of `dim` elements,
/// `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows<'a> {
    /// F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or IQ4_NL.
    pub ty: TensorType,
    pub data: DeviceSlice<'a>,
    pub heads: usize,
    pub dim: usize,
    pub stride: usize,
    pub n_ctx: usize,
}

impl<'a> DeviceRows<'a> {
    /// The first `dim` elements of each row.
    pub fn narrow(self, dim: usize) -> Self {
        assert!(dim <= self.dim, "{dim} elements of {}", self.dim);
        DeviceRows { dim, ..self }
    }

    /// The bytes as rows of `dim` elements, of one head.
    pub fn unpacked(self, dim: usize) -> Self {
        assert!(self.heads == 1 && self.dim == self.stride, "whole rows of one head");
        DeviceRows { dim, stride: dim, n_ctx: self.n_ctx * self.dim / dim, ..self }
    }

    /// The first `n` heads.
    pub fn first_heads(self, n: usize) -> Self {
        assert!(n <= self.heads, "{n} heads of {}", self.heads);
        DeviceRows { heads: n, ..self }
    }

    /// The last head alone.
    pub fn last_head(self) -> Self {
        let data = self.by_head().last().expect("rows of some heads");
        DeviceRows { data, heads: 1, ..self }
    }

    /// The bytes of each head's rows.
    pub fn by_head(&self) -> impl Iterator<Item = DeviceSlice<'a>> + use<'a> {
        let (data, bytes) = (self.data, self.n_ctx * self.row_bytes());
        (0..self.heads).map(move |head| data.slice(head * bytes..(head + 1) * bytes))
    }

    /// Bytes from one row to the next.
    pub fn row_bytes(&self) -> usize {
        self.stride / self.ty.block_len() * self.ty.block_bytes()
    }

    /// The number of the type in `kernels/cache_rows.cuh`.
    pub(super) fn type_code(&self) -> u32 {
        let code = TYPES.iter().position(|ty| *ty == self.ty);
        code.unwrap_or_else(|| panic!("a cache is not stored as {}", self.ty)) as u32
    }

    /// Whether rows are blocks, which can begin at any even address.
    fn are_blocks(&self) -> bool {
        self.ty.block_len() > 1
    }

    /// Whether every row can be read four elements at a time.
    pub(super) fn can_load_four(&self) -> bool {
        self.dim.is_multiple_of(4) && (self.are_blocks() || self.lie_on_multiples_of(4))
    }

    /// Whether every row can be read as halves, eight at a time.
    pub(super) fn can_load_eight(&self) -> bool {
        let is_half = self.ty == F16 && self.lie_on_multiples_of(8);
        self.dim.is_multiple_of(8) && (is_half || self.are_blocks())
    }

    /// Whether rows begin on multiples of the bytes of `n` elements.
    fn lie_on_multiples_of(&self, n: usize) -> bool {
        let bytes = n * self.ty.block_bytes();
        self.stride.is_multiple_of(n) && self.data.address().is_multiple_of(bytes as u64)
    }

    /// # Panics
    /// If rows overlap, cut a block, or are not all there.
    pub(super) fn assert_whole(&self) {
        let DeviceRows { ty, data, heads, dim, stride, n_ctx } = *self;
        let _ = self.type_code();
        assert!(dim > 0 && dim <= stride, "rows of {dim} elements, {stride} apart");
        assert!(stride.is_multiple_of(ty.block_len()), "{stride} elements cut a block of {ty}");
        let last = dim / ty.block_len() * ty.block_bytes();
        let rows = heads * n_ctx;
        let bytes = rows.saturating_sub(1) * self.row_bytes() + rows.min(1) * last;
        assert!(bytes <= data.len(), "{heads}×{n_ctx} rows in {} bytes", data.len());
        // Blocks' scales are halves.
        let align = if self.are_blocks() { 2 } else { ty.block_bytes() as u64 };
        assert!(data.address().is_multiple_of(align), "rows of {ty} at {:#x}", data.address());
    }
}

kernel_params! {
    pub struct CacheStoreParams[56] {
        x: DevicePtr,
        past: DevicePtr,
        rows: DevicePtr,
        tokens: u32,
        heads: u32,
        dim: u32,
        row_bytes: u32,
        n_ctx: u32,
        type_code: u32,
        block: u32,
        unused: u32,
    }
}

kernels! {
    pub struct CacheStore {
        f32s: CacheStoreParams = "cache_store_f32",
        f16s: CacheStoreParams = "cache_store_f16",
        bf16s: CacheStoreParams = "cache_store_bf16",
        q8_0: CacheStoreParams = "cache_store_q8_0",
        nibbles: CacheStoreParams = "cache_store_nibbles",
    }
}

impl CacheStore {
    /// Stores `x` f32 [tokens, heads, dim] at positions from `past` on, a u32 in device memory, so
    /// that a graph can be run again as the text grows: the bits of `RowsMut::store`. Tokens whose
    /// position is n_ctx or more are left out.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn store(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        tokens: usize,
        past: DeviceSlice,
        rows: DeviceRows,
    ) -> Result<()> {
        self.store_blocks(stream, x, tokens, past, rows, 1)
    }

    /// Stores rows of blocks of so many positions; a block has one row, which its last token makes.
    pub fn store_blocks(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        tokens: usize,
        past: DeviceSlice,
        rows: DeviceRows,
        block: usize,
    ) -> Result<()> {
        rows.assert_whole();
        let n = tokens * rows.heads * rows.dim;
        assert!(x.holds::<f32>(n), "{tokens} tokens in {} bytes", x.len());
        assert!(past.holds::<u32>(1));
        let kernel = match rows.ty {
            F32 => self.f32s,
            F16 => self.f16s,
            BF16 => self.bf16s,
            Q8_0 => self.q8_0,
            _ => self.nibbles,
        };
        assert!(rows.dim.is_multiple_of(rows.ty.block_len()), "whole blocks are stored");
        if n == 0 {
            return Ok(());
        }
        let params = CacheStoreParams {
            x: x.into(),
            past: past.into(),
            rows: rows.data.into(),
            tokens: u32_of(tokens),
            heads: u32_of(rows.heads),
            dim: u32_of(rows.dim),
            row_bytes: u32_of(rows.row_bytes()),
            n_ctx: u32_of(rows.n_ctx),
            type_code: rows.type_code(),
            block: u32_of(block),
            unused: 0,
        };
        // SAFETY: sizes are asserted, and it writes nothing from position n_ctx on.
        unsafe { stream.launch(kernel, Grid::each(n, THREADS), &params) }
    }
}
