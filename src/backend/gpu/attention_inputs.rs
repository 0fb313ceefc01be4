//! Queries, keys and values between their products and attention (`kernels/attention_inputs.cu`).
//! Twin: `forward::attention`.

use super::cache::DeviceRows;
use super::rope::DeviceCosSin;
use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::backend::ops::{RopePairing, RopeShape};

/// Heads of a block, each of which a warp takes.
const HEADS: usize = 4;
const WARP: u32 = 32;

kernel_params! {
    pub struct AttentionInputsParams[176] {
        q: DevicePtr,
        k: DevicePtr,
        v: DevicePtr,
        q_stride: u32,
        q_step: u32,
        k_stride: u32,
        v_stride: u32,
        q_norm: DevicePtr,
        k_norm: DevicePtr,
        v_norm: DevicePtr,
        cos_sin: DevicePtr,
        factors: DevicePtr,
        q_out: DevicePtr,
        keys: DevicePtr,
        values: DevicePtr,
        past: DevicePtr,
        n_head: u32,
        n_head_kv: u32,
        k_dim: u32,
        v_dim: u32,
        k_row: u32,
        v_row: u32,
        k_type: u32,
        v_type: u32,
        n_ctx: u32,
        pairs: u32,
        offset: u32,
        adjacent: u32,
        norm_last: u32,
        eps: f32,
        limit: f32,
        unused: u32,
    }
}

kernels! {
    pub struct AttentionInputs {
        inputs: AttentionInputsParams = "attention_inputs",
    }
}

/// Heads of tokens among other numbers.
#[derive(Clone, Copy)]
pub struct HeadRows<'a> {
    /// From the first token's first head on.
    pub data: DeviceSlice<'a>,
    /// f32s from a token to the next, and from a head to the next.
    pub stride: usize,
    pub step: usize,
}

impl HeadRows<'_> {
    fn assert_has(&self, tokens: usize, heads: usize, dim: usize) {
        let end = (tokens - 1) * self.stride + (heads - 1) * self.step + dim;
        assert!(dim <= self.step && self.data.holds::<f32>(end), "{tokens} tokens' heads");
    }
}

/// Keys and values, and the rows of the cache that they are stored in.
#[derive(Clone, Copy)]
pub struct NewRows<'a> {
    /// Heads without gaps.
    pub k: HeadRows<'a>,
    pub v: HeadRows<'a>,
    pub keys: DeviceRows<'a>,
    pub values: DeviceRows<'a>,
    /// u32 `[1]`: the position of the first token
    pub past: DeviceSlice<'a>,
}

/// The steps of queries, keys and values.
#[derive(Clone, Copy)]
pub struct InputSteps<'a> {
    /// RMSNorm of each head of queries, of keys and of values, by weights f32 `[dim]`.
    pub norms: [Option<DeviceSlice<'a>>; 3],
    pub eps: f32,
    /// Norms of queries and keys come behind the rotation.
    pub norm_last: bool,
    /// Elements are limited to ± this first.
    pub limit: Option<f32>,
    /// A row of the table for each token.
    pub rope: Option<(RopeShape, DeviceCosSin<'a>)>,
    /// Factors on queries in the place of cosines, f32 [tokens, dim / 2, 2].
    pub factors: Option<(RopeShape, DeviceCosSin<'a>)>,
}

impl AttentionInputs {
    /// Queries of `tokens`, `n_head` of `dim`, → `out` f32 [tokens, n_head, dim]; keys and values →
    /// the cache, but for tokens whose position is n_ctx or more.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn launch(
        &self,
        stream: &Stream,
        [tokens, n_head, dim]: [usize; 3],
        q: HeadRows,
        new: Option<NewRows>,
        steps: &InputSteps,
        out: DeviceSlice,
    ) -> Result<()> {
        if tokens == 0 {
            return Ok(());
        }
        q.assert_has(tokens, n_head, dim);
        assert!(out.holds::<f32>(tokens * n_head * dim), "{tokens} tokens' queries");
        let params = AttentionInputsParams {
            q: q.data.into(),
            q_stride: u32_of(q.stride),
            q_step: u32_of(q.step),
            q_out: out.into(),
            n_head: u32_of(n_head),
            k_dim: u32_of(dim),
            ..Default::default()
        };
        let params = new.map_or(params, |new| with_rows(params, tokens, &new));
        let params = with_steps(params, tokens, steps);
        let heads = n_head + 2 * params.n_head_kv as usize;
        let padded = dim.max(params.v_dim as usize).next_multiple_of(8);
        let grid = Grid {
            blocks: [u32_of(heads.div_ceil(HEADS)), u32_of(tokens), 1],
            threads: [WARP, HEADS as u32, 1],
            shared_bytes: 4 * u32_of(HEADS * padded),
        };
        // SAFETY: sizes are asserted, and it writes nothing from position n_ctx on.
        unsafe { stream.launch(self.inputs, grid, &params) }
    }
}

fn with_rows(params: AttentionInputsParams, tokens: usize, new: &NewRows) -> AttentionInputsParams {
    let NewRows { k, v, keys, values, past } = *new;
    for (from, to) in [(k, keys), (v, values)] {
        from.assert_has(tokens, to.heads, to.dim);
        to.assert_whole();
        assert_eq!(from.step, to.dim, "heads without gaps");
        assert!(to.dim.is_multiple_of(to.ty.block_len()), "whole blocks are stored");
    }
    assert_eq!((keys.heads, keys.n_ctx), (values.heads, values.n_ctx));
    assert_eq!(keys.dim, params.k_dim as usize);
    assert!(past.holds::<u32>(1));
    AttentionInputsParams {
        k: k.data.into(),
        v: v.data.into(),
        k_stride: u32_of(k.stride),
        v_stride: u32_of(v.stride),
        keys: keys.data.into(),
        values: values.data.into(),
        past: past.into(),
        n_head_kv: u32_of(keys.heads),
        v_dim: u32_of(values.dim),
        k_row: u32_of(keys.row_bytes()),
        v_row: u32_of(values.row_bytes()),
        k_type: keys.type_code(),
        v_type: values.type_code(),
        n_ctx: u32_of(keys.n_ctx),
        ..params
    }
}

fn with_steps(
    params: AttentionInputsParams,
    tokens: usize,
    steps: &InputSteps,
) -> AttentionInputsParams {
    let dims = [params.k_dim, params.k_dim, params.v_dim];
    let has_rows = params.n_head_kv > 0;
    let mut norms = steps.norms;
    norms[1..].iter_mut().filter(|_| !has_rows).for_each(|norm| *norm = None);
    for (norm, dim) in norms.iter().zip(dims) {
        assert!(norm.is_none_or(|norm| norm.count::<f32>() == dim as usize), "weights of a head");
    }
    let [q_norm, k_norm, v_norm] = norms.map(DevicePtr::from);
    let dim = params.k_dim as usize;
    for (shape, table) in steps.rope.iter().chain(&steps.factors) {
        assert!(table.data.holds::<f32>(2 * tokens * table.n_pairs), "a row for each token");
        assert!(table.data.address().is_multiple_of(8), "a pair is one load");
        assert!(!table.back, "queries and keys turn forwards");
        assert!(shape.head_dim == dim && shape.offset + 2 * table.n_pairs <= dim);
    }
    let is_whole = |(shape, table): &(RopeShape, DeviceCosSin)| {
        shape.offset == 0 && 2 * table.n_pairs == shape.head_dim
    };
    assert!(steps.factors.as_ref().is_none_or(is_whole), "a factor for each pair");
    let mut shapes = steps.rope.iter().chain(&steps.factors).map(|(shape, _)| shape.pairing);
    let is_adjacent = shapes.next() == Some(RopePairing::Adjacent);
    let params = AttentionInputsParams {
        q_norm,
        k_norm,
        v_norm,
        factors: steps.factors.map(|(_, table)| table.data).into(),
        adjacent: is_adjacent.into(),
        norm_last: steps.norm_last.into(),
        eps: steps.eps,
        limit: steps.limit.unwrap_or(0.0),
        ..params
    };
    match steps.rope {
        None => params,
        Some((shape, table)) => AttentionInputsParams {
            cos_sin: table.data.into(),
            pairs: u32_of(table.n_pairs),
            offset: u32_of(shape.offset),
            ..params
        },
    }
}
