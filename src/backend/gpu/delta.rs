//! The gated delta rule of linear-attention layers (`kernels/delta.cu`). Twin: `cpu::delta`, to the
//! bit. The state stays in device memory.

use super::{DevicePtr, DeviceSlice, Grid, Kernel, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::backend::ops::{DeltaShape, HeadOrder};

const WARP: usize = 32;
const THREADS: u32 = 128;
/// A warp loads the queries and keys of so many tokens at once.
const STAGED: usize = 8;

kernel_params! {
    pub struct DeltaRuleParams[96] {
        qkv: DevicePtr,
        betas: DevicePtr,
        alphas: DevicePtr,
        a: DevicePtr,
        dt: DevicePtr,
        state: DevicePtr,
        out: DevicePtr,
        gate_stride: u32,
        run: u32,
        pitch: u32,
        tokens: u32,
        n_k_heads: u32,
        n_v_heads: u32,
        k_dim: u32,
        v_dim: u32,
        tiled: u32,
        bound: f32,
    }
}

kernel_params! {
    pub struct DeltaNormParams[40] {
        x: DevicePtr,
        weight: DevicePtr,
        gate: DevicePtr,
        eps: f32,
        rows: u32,
        dim: u32,
        sigmoid_gate: u32,
    }
}

kernels! {
    pub struct Delta {
        rule: DeltaRuleParams = "delta_rule",
        kda: DeltaRuleParams = "kda_rule",
        norm: DeltaNormParams = "delta_norm",
    }
}

/// The gates of the rule: sigmoid(beta) is the part of a key's old value that is replaced,
/// e^(a · softplus(alpha + dt)) the factor on the state.
#[derive(Clone, Copy)]
pub struct DeviceGates<'a> {
    pub products: GateProducts<'a>,
    /// f32 `[n_v_heads]`
    pub dt: DeviceSlice<'a>,
    /// f32 `[n_v_heads]`
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

/// The gates of a rule with a decay for each element of a key, f32. The decay is
/// e^(a · softplus(x + dt)), or e^(bound · sigmoid(a · (x + dt))) if there is a bound.
#[derive(Clone, Copy)]
pub struct KdaGates<'a> {
    /// [tokens, n_v_heads], as of [`DeviceGates`].
    pub beta: DeviceSlice<'a>,
    /// x: [tokens, n_v_heads, k_dim].
    pub decay: DeviceSlice<'a>,
    /// [n_v_heads, k_dim]
    pub dt: DeviceSlice<'a>,
    /// `[n_v_heads]`
    pub a: DeviceSlice<'a>,
    /// Below 0.
    pub bound: Option<f32>,
}

/// The function of a gate behind a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormGate {
    Silu,
    Sigmoid,
}

impl Delta {
    /// The recurrence over `qkv` f32 [tokens, channels], convolved, whose queries and keys are unit
    /// vectors: `out` f32 [tokens, n_v_heads, v_dim]. `state` f32 [n_v_heads, k_dim, v_dim].
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
        let params = with_gates(params_of(shape, qkv, state, out), gates);
        launch(stream, self.rule, &params, 2)
    }

    /// The rule with a decay for each element of a key.
    ///
    /// # Panics
    /// As `rule`.
    pub fn kda(
        &self,
        stream: &Stream,
        shape: DeltaShape,
        qkv: DeviceSlice,
        gates: KdaGates,
        state: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let params = params_of(shape, qkv, state, out);
        let KdaGates { beta, decay, dt, a, bound } = gates;
        let (n, heads, tokens) = (params.n_v_heads, shape.n_v_heads, params.tokens as usize);
        assert_eq!([beta, a].map(DeviceSlice::count::<f32>), [tokens * heads, heads]);
        let counts = [decay, dt].map(DeviceSlice::count::<f32>);
        assert_eq!(counts, [tokens * heads * shape.k_dim, heads * shape.k_dim]);
        assert!(bound.is_none_or(|bound| bound < 0.0), "a bound of logarithms");
        let params = DeltaRuleParams {
            betas: beta.into(),
            alphas: decay.into(),
            a: a.into(),
            dt: dt.into(),
            gate_stride: n,
            run: n,
            pitch: n,
            bound: bound.unwrap_or(0.0),
            ..params
        };
        launch(stream, self.kda, &params, 3)
    }

    /// `x` f32 [n, dim] ← rms_norm(x) · weight ⊙ function(gate), `weight` being f32 `[dim]`.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn rms_norm_gated(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        eps: f32,
        function: NormGate,
        gate: DeviceSlice,
    ) -> Result<()> {
        let (n, dim) = (x.count::<f32>(), weight.count::<f32>());
        assert!(n.is_multiple_of(dim) && gate.count::<f32>() == n, "{n} in rows of {dim}");
        if n == 0 {
            return Ok(());
        }
        let params = DeltaNormParams {
            x: x.into(),
            weight: weight.into(),
            gate: gate.into(),
            eps,
            rows: u32_of(n / dim),
            dim: u32_of(dim),
            sigmoid_gate: (function == NormGate::Sigmoid).into(),
        };
        let a_block = THREADS / WARP as u32;
        let blocks = [params.rows.div_ceil(a_block), 1, 1];
        let grid = Grid { blocks, threads: [WARP as u32, a_block, 1], shared_bytes: 0 };
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.norm, grid, &params) }
    }
}

fn tokens(shape: DeltaShape, x: DeviceSlice) -> usize {
    let (all, channels) = (x.count::<f32>(), shape.channels());
    assert!(all.is_multiple_of(channels), "{all} in rows of {channels}");
    all / channels
}

/// The parameters of a rule, but for its gates.
fn params_of(
    shape: DeltaShape,
    qkv: DeviceSlice,
    state: DeviceSlice,
    out: DeviceSlice,
) -> DeltaRuleParams {
    let DeltaShape { n_k_heads, n_v_heads, k_dim, v_dim, order, .. } = shape;
    let tokens = tokens(shape, qkv);
    assert_eq!(state.count::<f32>(), shape.n_state());
    assert_eq!(out.count::<f32>(), tokens * shape.value_width());
    DeltaRuleParams {
        qkv: qkv.into(),
        state: state.into(),
        out: out.into(),
        tokens: u32_of(tokens),
        n_k_heads: u32_of(n_k_heads),
        n_v_heads: u32_of(n_v_heads),
        k_dim: u32_of(k_dim),
        v_dim: u32_of(v_dim),
        tiled: (order == HeadOrder::Tiled).into(),
        ..Default::default()
    }
}

/// Launches a rule that keeps `n_staged` vectors of a token, each as long as a key.
///
/// # Panics
/// If they and 32 columns of a state do not fit a block's shared memory.
fn launch(
    stream: &Stream,
    kernel: Kernel<DeltaRuleParams>,
    params: &DeltaRuleParams,
    n_staged: usize,
) -> Result<()> {
    let most = stream.gpu().info().shared_bytes_max as usize;
    let bytes = 4 * params.k_dim as usize * (WARP + n_staged * STAGED);
    assert!(bytes <= most, "a block has {most} bytes of shared memory, not {bytes}");
    if params.tokens == 0 {
        return Ok(());
    }
    let blocks = [params.v_dim.div_ceil(WARP as u32), params.n_v_heads, 1];
    let grid = Grid::new(blocks, WARP as u32).with_shared(bytes);
    // SAFETY: the callers have checked the sizes.
    unsafe { stream.launch(kernel, grid, params) }
}

/// The parameters with these gates.
fn with_gates(params: DeltaRuleParams, gates: DeviceGates) -> DeltaRuleParams {
    let (n, tokens) = (params.n_v_heads, params.tokens as usize);
    let heads = n as usize;
    assert_eq!([gates.dt, gates.a].map(DeviceSlice::count::<f32>), [heads; 2]);
    let params = DeltaRuleParams { a: gates.a.into(), dt: gates.dt.into(), ..params };
    match gates.products {
        GateProducts::Mixed(both) => {
            assert_eq!(both.count::<f32>(), 2 * tokens * heads);
            let run = n / params.n_k_heads;
            let alphas = both.slice(4 * run as usize..both.len()).into();
            let (betas, gate_stride, pitch) = (both.into(), 2 * n, 2 * run);
            DeltaRuleParams { betas, alphas, gate_stride, run, pitch, ..params }
        }
        GateProducts::Apart { beta, alpha } => {
            assert_eq!([beta, alpha].map(DeviceSlice::count::<f32>), [tokens * heads; 2]);
            let (betas, alphas) = (beta.into(), alpha.into());
            DeltaRuleParams { betas, alphas, gate_stride: n, run: n, pitch: n, ..params }
        }
    }
}
