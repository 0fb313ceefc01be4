//! The gated delta rule of linear-attention layers (`kernels/delta.cu`). Twin: `cpu::delta`, to the
//! bit. Past inputs and state stay in device memory.

use super::{Args, Device, DeviceSlice, Kernel, Launch, Stream};
use crate::Result;
use crate::backend::ops::{DeltaShape, HeadOrder};

const WARP: usize = 32;
const THREADS: u32 = 128;
/// Tokens whose queries and keys a warp loads at once.
const STAGED: usize = 8;

pub struct Delta {
    inputs: Kernel,
    past: Kernel,
    rule: Kernel,
    norm: Kernel,
}

/// How much of a key's old value is replaced, sigmoid(beta), and by what the state is multiplied,
/// e^(a · softplus(alpha + dt)).
#[derive(Clone, Copy)]
pub struct DeviceGates<'a> {
    pub products: GateProducts<'a>,
    /// f32 [n_v_heads]
    pub dt: DeviceSlice<'a>,
    /// f32 [n_v_heads]
    pub a: DeviceSlice<'a>,
}

/// beta and alpha, f32.
#[derive(Clone, Copy)]
pub enum GateProducts<'a> {
    /// [tokens, 2 · n_v_heads]: by key head, its value heads' betas, then their alphas.
    Mixed(DeviceSlice<'a>),
    /// [tokens, n_v_heads] each.
    Apart { beta: DeviceSlice<'a>, alpha: DeviceSlice<'a> },
}

impl Delta {
    pub fn load(gpu: &Device) -> Result<Delta> {
        Ok(Delta {
            inputs: gpu.kernel("delta_inputs")?,
            past: gpu.kernel("delta_past")?,
            rule: gpu.kernel("delta_rule")?,
            norm: gpu.kernel("delta_norm")?,
        })
    }

    /// `x` f32 [tokens, channels] → `qkv`, of the same shape: convolution, silu, and queries and
    /// keys as unit vectors (queries over √k_dim). `past` f32 [kernel − 1, channels] is what came
    /// before `x`, and afterwards what comes before the next; `weight` f32 [channels, kernel].
    ///
    /// # Panics
    /// If sizes do not fit each other or a head of k does not fit a block's shared memory.
    pub fn inputs(
        &self,
        stream: &Stream,
        shape: DeltaShape,
        weight: DeviceSlice,
        past: DeviceSlice,
        x: DeviceSlice,
        qkv: DeviceSlice,
    ) -> Result<()> {
        let (channels, tokens) = (shape.channels(), tokens(shape, x));
        assert_eq!(
            [past, weight].map(DeviceSlice::count::<f32>),
            [shape.n_past(), channels * shape.kernel]
        );
        assert_eq!(qkv.count::<f32>(), tokens * channels);
        let shared_bytes = shared(stream, 4 * shape.k_dim);
        if tokens == 0 {
            return Ok(());
        }
        let args = Args::new().slice(x).slice(past).slice(weight).slice(qkv);
        let args = args.size(tokens).size(channels).size(shape.kernel).size(shape.k_dim);
        let args = args.size(shape.n_k_heads).f32(1.0 / (shape.k_dim as f32).sqrt());
        let grid = [channels.div_ceil(shape.k_dim) as u32, tokens as u32, 1];
        let block = [THREADS, 1, 1];
        let launch = Launch { kernel: self.inputs, grid, block, shared_bytes, args: &args };
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&launch)? };
        if tokens == 1 {
            // The kernel has moved the past itself.
            return Ok(());
        }
        let args = Args::new().slice(x).slice(past).size(tokens).size(channels);
        let args = args.size(shape.kernel - 1);
        // SAFETY: as above.
        unsafe { stream.launch(&Launch::each(self.past, channels, THREADS, &args)) }
    }

    /// The recurrence over what `inputs` made: `out` f32 [tokens, n_v_heads, v_dim]. `state` f32
    /// [n_v_heads, k_dim, v_dim].
    ///
    /// # Panics
    /// If sizes do not fit each other or 32 columns of a head's state do not fit a block's shared
    /// memory.
    pub fn rule(
        &self,
        stream: &Stream,
        shape: DeltaShape,
        qkv: DeviceSlice,
        gates: DeviceGates,
        state: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let DeltaShape { n_k_heads, n_v_heads, k_dim, v_dim, order, .. } = shape;
        let tokens = tokens(shape, qkv);
        assert_eq!(state.count::<f32>(), shape.n_state());
        assert_eq!(out.count::<f32>(), tokens * shape.value_width());
        let shared_bytes = shared(stream, 4 * k_dim * (WARP + 2 * STAGED));
        if tokens == 0 {
            return Ok(());
        }
        let args = gate_args(Args::new().slice(qkv), shape, gates, tokens);
        let args = args.slice(state).slice(out).size(tokens).size(n_k_heads).size(n_v_heads);
        let tiled = u32::from(order == HeadOrder::Tiled);
        let args = args.size(k_dim).size(v_dim).u32(tiled);
        let grid = [v_dim.div_ceil(WARP) as u32, n_v_heads as u32, 1];
        let block = [WARP as u32, 1, 1];
        let launch = Launch { kernel: self.rule, grid, block, shared_bytes, args: &args };
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&launch) }
    }

    /// `x` f32 [n, dim] ← rms_norm(x) · weight ⊙ silu(gate), `weight` being f32 [dim].
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn rms_norm_gated(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        eps: f32,
        gate: DeviceSlice,
    ) -> Result<()> {
        let (n, dim) = (x.count::<f32>(), weight.count::<f32>());
        assert!(n.is_multiple_of(dim) && gate.count::<f32>() == n, "{n} in rows of {dim}");
        if n == 0 {
            return Ok(());
        }
        let rows = n / dim;
        let args = Args::new().slice(x).slice(weight).f32(eps).slice(gate).size(rows).size(dim);
        let a_block = THREADS / WARP as u32;
        let (grid, block) = ([(rows as u32).div_ceil(a_block), 1, 1], [WARP as u32, a_block, 1]);
        let launch = Launch { kernel: self.norm, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&launch) }
    }
}

fn tokens(shape: DeltaShape, x: DeviceSlice) -> usize {
    let (all, channels) = (x.count::<f32>(), shape.channels());
    assert!(all.is_multiple_of(channels), "{all} in rows of {channels}");
    all / channels
}

/// Shared memory of a block, if it can have that much.
fn shared(stream: &Stream, bytes: usize) -> u32 {
    let most = stream.gpu().info().shared_bytes_max;
    let fits = u32::try_from(bytes).ok().filter(|bytes| *bytes <= most);
    fits.unwrap_or_else(|| panic!("a block has {most} bytes of shared memory, not {bytes}"))
}

/// Betas, alphas, numbers a token, heads of a run, how far apart runs are; `a` and `dt`.
fn gate_args(args: Args, shape: DeltaShape, gates: DeviceGates, tokens: usize) -> Args {
    let n = shape.n_v_heads;
    assert_eq!([gates.dt, gates.a].map(DeviceSlice::count::<f32>), [n; 2]);
    let args = match gates.products {
        GateProducts::Mixed(both) => {
            assert_eq!(both.count::<f32>(), 2 * tokens * n);
            let run = n / shape.n_k_heads;
            let alphas = both.slice(4 * run..both.len());
            args.slice(both).slice(alphas).size(2 * n).size(run).size(2 * run)
        }
        GateProducts::Apart { beta, alpha } => {
            assert_eq!([beta, alpha].map(DeviceSlice::count::<f32>), [tokens * n; 2]);
            args.slice(beta).slice(alpha).size(n).size(n).size(n)
        }
    };
    args.slice(gates.a).slice(gates.dt)
}
