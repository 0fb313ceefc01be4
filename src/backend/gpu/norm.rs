//! Normalisation and sums of rows (`kernels/norm.cu`); twins in `cpu::norm`.

use super::{Args, Device, DeviceSlice, Kernel, Launch, Stream};
use crate::Result;

/// Threads of a block, over all its rows.
const THREADS: u32 = 256;

pub struct Norm {
    rms_norm: Kernel,
    rms_norm_in_place: Kernel,
    layer_norm: Kernel,
    add_scaled: Kernel,
}

/// (rows a block, threads a row): a warp is enough for a head, a long row takes a block.
fn shape(dim: usize) -> [u32; 2] {
    let rows = match dim {
        0..=512 => 8,
        513..=1024 => 2,
        _ => 1,
    };
    [rows, THREADS / rows]
}

impl Norm {
    pub fn load(gpu: &Device) -> Result<Norm> {
        Ok(Norm {
            rms_norm: gpu.kernel("rms_norm")?,
            rms_norm_in_place: gpu.kernel("rms_norm_in_place")?,
            layer_norm: gpu.kernel("layer_norm")?,
            add_scaled: gpu.kernel("add_scaled")?,
        })
    }

    /// RMSNorm of each row of `x` f32 [n, dim] into `out`, `weight` being [dim]: the twin's bits.
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
        let args = Args::new().slice(x).slice(weight).f32(eps).slice(out);
        self.rms(stream, self.rms_norm, args, n / dim, dim)
    }

    /// RMSNorm of each head of `x` f32 [tokens, heads, dim] in place.
    pub fn rms_norm_heads(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        eps: f32,
    ) -> Result<()> {
        let (dim, n) = (weight.count::<f32>(), x.count::<f32>());
        assert!(n.is_multiple_of(dim), "{n} in rows of {dim}");
        let args = Args::new().slice(x).slice(weight).f32(eps);
        self.rms(stream, self.rms_norm_in_place, args, n / dim, dim)
    }

    fn rms(&self, on: &Stream, kernel: Kernel, args: Args, rows: usize, dim: usize) -> Result<()> {
        let args = args.size(rows).size(dim);
        let [rows_a_block, threads] = shape(dim);
        let blocks = (rows as u32).div_ceil(rows_a_block);
        let (grid, block) = ([blocks, 1, 1], [threads, rows_a_block, 1]);
        let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's; the callers have checked the sizes.
        if rows == 0 { Ok(()) } else { unsafe { on.launch(&launch) } }
    }

    /// LayerNorm of each row of `x` f32 [n, dim] into `out`; sums of f64 in another order than the
    /// twin's, so the last bit may differ.
    pub fn layer_norm_rows(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        (weight, bias): (DeviceSlice, DeviceSlice),
        eps: f32,
        out: DeviceSlice,
    ) -> Result<()> {
        let (dim, n) = (weight.count::<f32>(), x.count::<f32>());
        assert!(n == out.count::<f32>() && n.is_multiple_of(dim), "{n} in rows of {dim}");
        assert_eq!(bias.count::<f32>(), dim);
        if n == 0 {
            return Ok(());
        }
        let args = Args::new().slice(x).slice(weight).slice(bias).f32(eps).slice(out).size(dim);
        let (grid, block) = ([(n / dim) as u32, 1, 1], [THREADS, 1, 1]);
        let launch = Launch { kernel: self.layer_norm, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&launch) }
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
        let args = Args::new().slice(acc).f32(scale).slice(x).size(n);
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&Launch::each(self.add_scaled, n, THREADS, &args)) }
    }
}
