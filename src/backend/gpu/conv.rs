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
    /// f32 `[channels]`
    pub bias: Option<DeviceSlice<'a>>,
    pub silu: bool,
    /// Parts that become unit vectors, as queries and keys of a delta rule.
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

    fn tokens(&self) -> usize {
        let all = self.rows.count::<f32>();
        assert!(all.is_multiple_of(self.stride), "{all} in rows of {}", self.stride);
        all / self.stride
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
        self.convolve(stream, conv, past, x, out)?;
        match x.tokens() {
            1 => Ok(()),
            _ => self.move_past(stream, conv, past, x),
        }
    }

    /// Convolves; but where there are several tokens, `past` stays as it is.
    ///
    /// # Panics
    /// As `launch`.
    pub fn convolve(
        &self,
        stream: &Stream,
        conv: &DeviceConv,
        past: DeviceSlice,
        x: ConvRows,
        out: DeviceSlice,
    ) -> Result<()> {
        let DeviceConv { shape: ConvShape { channels, kernel }, units, .. } = *conv;
        let most = stream.gpu().info().shared_bytes_max as usize;
        assert_eq!(conv.weight.count::<f32>(), channels * kernel);
        assert!(conv.bias.is_none_or(|bias| bias.count::<f32>() == channels), "a bias a channel");
        assert_eq!(out.count::<f32>(), x.tokens() * channels);
        let part = units.map_or(THREADS as usize, |units| units.dim);
        let shared_bytes = if units.is_some() { 4 * part } else { 0 };
        assert!(shared_bytes <= most, "a block has {most} bytes of shared memory");
        assert!(units.is_none_or(|units| units.n * units.dim <= channels), "units are channels");
        let params = ShortConvParams {
            weight: conv.weight.into(),
            bias: conv.bias.into(),
            gate: x.gate.map_or_else(DevicePtr::default, |first| x.columns(first)),
            out: out.into(),
            silu: conv.silu.into(),
            part: u32_of(part),
            n_units: u32_of(units.map_or(0, |units| units.n)),
            n_queries: u32_of(units.map_or(0, |units| units.n_queries)),
            query_scale: 1.0 / (part as f32).sqrt(),
            ..params_of(conv.shape, past, x)
        };
        if params.tokens == 0 {
            return Ok(());
        }
        let blocks = [u32_of(channels.div_ceil(part)), params.tokens, 1];
        let grid = Grid::new(blocks, THREADS).with_shared(shared_bytes);
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.conv, grid, &params) }
    }

    /// Makes `past` what comes behind `x`.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn move_past(
        &self,
        stream: &Stream,
        conv: &DeviceConv,
        past: DeviceSlice,
        x: ConvRows,
    ) -> Result<()> {
        let params = params_of(conv.shape, past, x);
        if params.tokens == 0 || params.kernel == 1 {
            return Ok(());
        }
        let grid = Grid::each(conv.shape.channels, THREADS);
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.past, grid, &params) }
    }
}

/// The parameters of both kernels.
fn params_of(shape: ConvShape, past: DeviceSlice, x: ConvRows) -> ShortConvParams {
    let firsts = [Some(x.first), x.factor, x.gate].into_iter().flatten();
    firsts.for_each(|first| assert!(first + shape.channels <= x.stride, "channels of a row"));
    assert_eq!(past.count::<f32>(), shape.n_past());
    ShortConvParams {
        x: x.columns(x.first),
        factor: x.factor.map_or_else(DevicePtr::default, |first| x.columns(first)),
        past: past.into(),
        stride: u32_of(x.stride),
        tokens: u32_of(x.tokens()),
        channels: u32_of(shape.channels),
        kernel: u32_of(shape.kernel),
        ..Default::default()
    }
}
