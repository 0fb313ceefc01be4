//! Normalisation and sums of rows (`kernels/norm.cu`). Twins: `cpu::norm`.

use super::acts::DeviceActs;
use super::rows::Columns;
use super::{DevicePtr, DeviceSlice, Grid, Kernel, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::simd::ActKind;

/// Threads of a block, over all its rows.
const THREADS: u32 = 256;

kernel_params! {
    pub struct RmsNormParams[48] {
        x: DevicePtr,
        weight: DevicePtr,
        out: DevicePtr,
        eps: f32,
        rows: u32,
        dim: u32,
        groups: u32,
        stride: u32,
        unused: u32,
    }
}

kernel_params! {
    pub struct RmsNormActsParams[56] {
        x: DevicePtr,
        weight: DevicePtr,
        out: DevicePtr,
        q8_0: DevicePtr,
        q8_k: DevicePtr,
        eps: f32,
        rows: u32,
        dim: u32,
        unused: u32,
    }
}

kernel_params! {
    pub struct LayerNormParams[40] {
        x: DevicePtr,
        weight: DevicePtr,
        bias: DevicePtr,
        out: DevicePtr,
        eps: f32,
        dim: u32,
    }
}

kernel_params! {
    pub struct AddScaledParams[24] {
        acc: DevicePtr,
        x: DevicePtr,
        scale: f32,
        n: u32,
    }
}

kernel_params! {
    pub struct AddNormedParams[32] {
        h: DevicePtr,
        y: DevicePtr,
        x: DevicePtr,
        scale: f32,
        n: u32,
    }
}

kernels! {
    pub struct Norm {
        rms_norm: RmsNormParams = "rms_norm",
        rms_norm_in_place: RmsNormParams = "rms_norm_in_place",
        rms_norm_acts: RmsNormActsParams = "rms_norm_acts",
        layer_norm: LayerNormParams = "layer_norm",
        add_scaled: AddScaledParams = "add_scaled",
        add_normed: AddNormedParams = "add_normed",
    }
}

/// Rows of a block: a warp is enough for a head, a long row takes a block.
fn rows_a_block(dim: usize) -> u32 {
    match dim {
        0..=512 => 8,
        513..=1024 => 2,
        _ => 1,
    }
}

fn rows_grid(rows: u32, dim: u32) -> Grid {
    let a_block = rows_a_block(dim as usize);
    let blocks = [rows.div_ceil(a_block), 1, 1];
    Grid { blocks, threads: [THREADS / a_block, a_block, 1], shared_bytes: 0 }
}

/// RMSNorm in place of each of `n_groups` parts of rows as long as `weight`.
fn groups_params(x: DeviceSlice, weight: DeviceSlice, n_groups: usize, eps: f32) -> RmsNormParams {
    let (width, n) = (weight.count::<f32>(), x.count::<f32>());
    assert!(n.is_multiple_of(width), "{n} in rows of {width}");
    assert!(width.is_multiple_of(n_groups), "{n_groups} groups of {width}");
    let dim = width / n_groups;
    RmsNormParams {
        weight: weight.into(),
        out: x.into(),
        eps,
        rows: u32_of(n / dim),
        dim: u32_of(dim),
        groups: u32_of(n_groups),
        stride: u32_of(dim),
        ..Default::default()
    }
}

impl Norm {
    /// RMSNorm of each row of `x` f32 [n, dim] into `out`, `weight` being `[dim]`: the twin's bits.
    pub fn rms_norm_rows(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        eps: f32,
        out: DeviceSlice,
    ) -> Result<()> {
        let (dim, n) = (weight.count::<f32>(), x.count::<f32>());
        assert!(n == out.count::<f32>() && n.is_multiple_of(dim), "{n} in rows of {dim}");
        self.rms_norm_columns(stream, Columns::new(x, dim, 0), weight, eps, Some(out))
    }

    /// `rms_norm_rows` that also stores the results in records of the kinds that there are, Q8_0
    /// and Q8_K: the bits of `Quantize::store`.
    pub fn rms_norm_acts(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        eps: f32,
        out: DeviceSlice,
        records: [Option<DeviceActs>; 2],
    ) -> Result<()> {
        let (dim, n) = (weight.count::<f32>(), x.count::<f32>());
        assert!(n == out.count::<f32>() && n.is_multiple_of(dim), "{n} in rows of {dim}");
        let rows = n / dim;
        for (records, kind) in records.iter().zip([ActKind::Q8_0, ActKind::Q8_K]) {
            let Some(records) = records else { continue };
            assert_eq!((records.kind, records.tokens, records.cols), (kind, rows, dim));
            assert_eq!((records.record_cols, records.first_col), (dim, 0), "whole records");
        }
        if rows == 0 {
            return Ok(());
        }
        let [q8_0, q8_k] = records.map(|records| records.map(|records| records.records).into());
        let params = RmsNormActsParams {
            x: x.into(),
            weight: weight.into(),
            out: out.into(),
            q8_0,
            q8_k,
            eps,
            rows: u32_of(rows),
            dim: u32_of(dim),
            unused: 0,
        };
        // SAFETY: sizes are asserted, and records where they were made.
        unsafe { stream.launch(self.rms_norm_acts, rows_grid(params.rows, params.dim), &params) }
    }

    /// RMSNorm of each head of `x` f32 [tokens, heads, dim] in place.
    pub fn rms_norm_heads(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        eps: f32,
    ) -> Result<()> {
        self.rms_norm_groups(stream, x, weight, 1, eps)
    }

    /// RMSNorm of each of `n_groups` parts of the rows of `x` f32 [tokens, n_groups, dim] in place,
    /// `weight` being f32 [n_groups, dim].
    pub fn rms_norm_groups(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        n_groups: usize,
        eps: f32,
    ) -> Result<()> {
        let params = groups_params(x, weight, n_groups, eps);
        self.rms(stream, self.rms_norm_in_place, params)
    }

    /// `rms_norm_groups` into `out`.
    pub fn rms_norm_groups_into(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        n_groups: usize,
        eps: f32,
        out: DeviceSlice,
    ) -> Result<()> {
        assert_eq!(out.len(), x.len());
        let params = groups_params(x, weight, n_groups, eps);
        let params = RmsNormParams { x: x.into(), out: out.into(), ..params };
        self.rms(stream, self.rms_norm, params)
    }

    /// RMSNorm of columns of rows, as many as `weight` f32 `[dim]` has, into `out` f32 [rows, dim]
    /// or in place.
    pub fn rms_norm_columns(
        &self,
        stream: &Stream,
        x: Columns,
        weight: DeviceSlice,
        eps: f32,
        out: Option<DeviceSlice>,
    ) -> Result<()> {
        let (dim, all) = (weight.count::<f32>(), x.data.count::<f32>());
        assert!(all.is_multiple_of(x.stride), "{all} in rows of {}", x.stride);
        assert!(x.first + dim <= x.stride, "columns of a row");
        let rows = all / x.stride;
        assert!(out.is_none_or(|out| out.count::<f32>() == rows * dim), "{rows} rows of {dim}");
        let own = x.data.slice((4 * x.first).min(x.data.len())..x.data.len());
        let params = RmsNormParams {
            x: own.into(),
            weight: weight.into(),
            out: out.unwrap_or(own).into(),
            eps,
            rows: u32_of(rows),
            dim: u32_of(dim),
            groups: 1,
            stride: u32_of(x.stride),
            unused: 0,
        };
        let kernel = if out.is_some() { self.rms_norm } else { self.rms_norm_in_place };
        self.rms(stream, kernel, params)
    }

    fn rms(
        &self,
        stream: &Stream,
        kernel: Kernel<RmsNormParams>,
        params: RmsNormParams,
    ) -> Result<()> {
        if params.rows == 0 {
            return Ok(());
        }
        // SAFETY: the callers have checked the sizes.
        unsafe { stream.launch(kernel, rows_grid(params.rows, params.dim), &params) }
    }

    /// LayerNorm of each row of `x` f32 [n, dim] into `out`.
    pub fn layer_norm_rows(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        bias: DeviceSlice,
        eps: f32,
        out: DeviceSlice,
    ) -> Result<()> {
        let (dim, n) = (weight.count::<f32>(), x.count::<f32>());
        assert!(n == out.count::<f32>() && n.is_multiple_of(dim), "{n} in rows of {dim}");
        assert_eq!(bias.count::<f32>(), dim);
        if n == 0 {
            return Ok(());
        }
        let params = LayerNormParams {
            x: x.into(),
            weight: weight.into(),
            bias: bias.into(),
            out: out.into(),
            eps,
            dim: u32_of(dim),
        };
        let grid = Grid::new([u32_of(n / dim), 1, 1], THREADS);
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.layer_norm, grid, &params) }
    }

    /// `acc += scale · x`, fused: the twin's bits, for a scale of 1, too.
    pub fn add_scaled(
        &self,
        stream: &Stream,
        acc: DeviceSlice,
        scale: f32,
        x: DeviceSlice,
    ) -> Result<()> {
        let n = acc.count::<f32>();
        assert_eq!(n, x.count::<f32>());
        if n == 0 {
            return Ok(());
        }
        let params = AddScaledParams { acc: acc.into(), x: x.into(), scale, n: u32_of(n) };
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.add_scaled, Grid::each(n, THREADS), &params) }
    }

    /// `x = scale · h + y`, all f32 of one shape: the bits of adding both to zero in this order,
    /// the first fused.
    pub fn add_normed(
        &self,
        stream: &Stream,
        scale: f32,
        h: DeviceSlice,
        y: DeviceSlice,
        x: DeviceSlice,
    ) -> Result<()> {
        let n = x.count::<f32>();
        assert_eq!([h, y].map(DeviceSlice::count::<f32>), [n; 2]);
        if n == 0 {
            return Ok(());
        }
        let params = AddNormedParams { h: h.into(), y: y.into(), x: x.into(), scale, n: u32_of(n) };
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.add_normed, Grid::each(n, THREADS), &params) }
    }
}
