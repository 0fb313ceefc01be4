//! Short convolutions (`kernels/conv.cu`). Twins: `Cpu::short_conv` and the products around it, to
//! the bit. Past inputs stay in device memory.

use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::backend::ops::{ConvShape, DeltaShape};

const THREADS: u32 = 128;

kernel_params! {
    pub struct ShortConvParams[96] {
        x: DevicePtr,
        factor: DevicePtr,
        past: DevicePtr,
        weight: DevicePtr,
        bias: DevicePtr,
        gate: DevicePtr,
        out: DevicePtr,
        stride: u32,
        tokens: u32,
        channels: u32,
        kernel: u32,
        silu: u32,
        part: u32,
        n_units: u32,
        n_queries: u32,
        query_scale: f32,
        unused: u32,
    }
}

kernels! {
    pub struct Conv {
        conv: ShortConvParams = "short_conv",
        past: ShortConvParams = "short_conv_past",
    }
}

/// A convolution's weights, see `ops::ShortConv`.
#[derive(Clone, Copy)]
pub struct DeviceConv<'a> {
    pub shape: ConvShape,
    /// f32 [channels, kernel]
    pub weight: DeviceSlice<'a>,
    /// f32 [channels]
    pub bias: Option<DeviceSlice<'a>>,
    pub silu: bool,
    /// What becomes unit vectors, as queries and keys of a delta rule.
    pub units: Option<Units>,
}

/// The first `n` parts of a row, of `dim` channels each, become unit vectors; the first `n_queries`
/// of them are divided by √dim.
#[derive(Clone, Copy, Debug)]
pub struct Units {
    pub dim: usize,
    pub n: usize,
    pub n_queries: usize,
}

impl Units {
    /// The heads of queries and keys.
    pub fn of(shape: DeltaShape) -> Units {
        Units { dim: shape.k_dim, n: 2 * shape.n_k_heads, n_queries: shape.n_k_heads }
    }
}

/// The input: channels of rows.
#[derive(Clone, Copy)]
pub struct ConvRows<'a> {
    /// f32 [tokens, stride]
    pub rows: DeviceSlice<'a>,
    pub stride: usize,
    /// The column of the first channel.
    pub first: usize,
    /// The first columns of what the input and the result are multiplied by.
    pub factor: Option<usize>,
    pub gate: Option<usize>,
}

impl<'a> ConvRows<'a> {
    /// Rows of channels and nothing else.
    pub fn plain(rows: DeviceSlice<'a>, channels: usize) -> ConvRows<'a> {
        ConvRows { rows, stride: channels, first: 0, factor: None, gate: None }
    }

    /// The rows' columns from `first` on.
    fn columns(&self, first: usize) -> DevicePtr {
        self.rows.slice((4 * first).min(self.rows.len())..self.rows.len()).into()
    }
}

impl Conv {
    /// The convolution of `x` into `out`, f32 [tokens, channels]. `past` f32 [kernel − 1, channels]
    /// is what came before `x`, as products with their factors, and afterwards what comes before
    /// the next.
    ///
    /// # Panics
    /// If sizes do not fit each other or a unit vector does not fit a block's shared memory.
    pub fn launch(
        &self,
        stream: &Stream,
        conv: &DeviceConv,
        past: DeviceSlice,
        x: ConvRows,
        out: DeviceSlice,
    ) -> Result<()> {
        let DeviceConv { shape: ConvShape { channels, kernel }, units, .. } = *conv;
        let (all, most) = (x.rows.count::<f32>(), stream.gpu().info().shared_bytes_max as usize);
        assert!(all.is_multiple_of(x.stride), "{all} in rows of {}", x.stride);
        let firsts = [Some(x.first), x.factor, x.gate].into_iter().flatten();
        firsts.for_each(|first| assert!(first + channels <= x.stride, "channels of a row"));
        let tokens = all / x.stride;
        assert_eq!(past.count::<f32>(), conv.shape.n_past());
        assert_eq!(conv.weight.count::<f32>(), channels * kernel);
        assert!(conv.bias.is_none_or(|bias| bias.count::<f32>() == channels), "a bias a channel");
        assert_eq!(out.count::<f32>(), tokens * channels);
        let part = units.map_or(THREADS as usize, |units| units.dim);
        let shared_bytes = if units.is_some() { 4 * part } else { 0 };
        assert!(shared_bytes <= most, "a block has {most} bytes of shared memory");
        assert!(units.is_none_or(|units| units.n * units.dim <= channels), "units are channels");
        if tokens == 0 {
            return Ok(());
        }
        let params = ShortConvParams {
            x: x.columns(x.first),
            factor: x.factor.map_or_else(DevicePtr::default, |first| x.columns(first)),
            past: past.into(),
            weight: conv.weight.into(),
            bias: conv.bias.into(),
            gate: x.gate.map_or_else(DevicePtr::default, |first| x.columns(first)),
            out: out.into(),
            stride: u32_of(x.stride),
            tokens: u32_of(tokens),
            channels: u32_of(channels),
            kernel: u32_of(kernel),
            silu: conv.silu.into(),
            part: u32_of(part),
            n_units: u32_of(units.map_or(0, |units| units.n)),
            n_queries: u32_of(units.map_or(0, |units| units.n_queries)),
            query_scale: 1.0 / (part as f32).sqrt(),
            unused: 0,
        };
        let blocks = [u32_of(channels.div_ceil(part)), params.tokens, 1];
        let grid = Grid::new(blocks, THREADS).with_shared(shared_bytes);
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.conv, grid, &params)? };
        if tokens == 1 || kernel == 1 {
            // The kernel has moved the past itself, or there is none.
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { stream.launch(self.past, Grid::each(channels, THREADS), &params) }
    }
}
