//! Granules of experts for few tokens (`kernels/expert.cu`). A *pair* is a (token, rank), token by
//! token. Twin: `backend::cpu::expert`.

use super::acts::DeviceActs;
use super::mat::{TypeKernels, types};
use super::matvec::{THREADS, lanes_a_row};
use super::{Args, Device, DeviceSlice, GRID_MAX, Kernel, Launch, Stream};
use crate::Result;
use crate::backend::ops::Activation;
use crate::gguf::TensorType;
use crate::simd::act_kind;
use std::ops::Range;

/// What a launch of `expert_gate_up` computes.
#[derive(Clone, Copy)]
enum Part {
    GateAndUp = 0,
    Gate = 1,
    Up = 2,
}

pub struct Experts {
    gate_up: TypeKernels,
    down: TypeKernels,
    ordered_sum: Kernel,
    /// Pairs of a launch at most: `GRID_MAX`, or fewer in tests.
    pub pairs_a_launch: usize,
}

/// A layer's experts, and how a granule lies in device memory: `granule_rows` rows of gate and of
/// up (fewer in the last granule of an expert) and as many columns of down, each without gaps and
/// from its own multiple of 16 bytes on.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape {
    pub gate: TensorType,
    pub up: TensorType,
    pub down: TensorType,
    pub n_embd: usize,
    pub n_ff: usize,
    pub granule_rows: usize,
    pub gate_at: usize,
    pub up_at: usize,
    pub down_at: usize,
    /// Experts a token.
    pub k: usize,
    pub activation: Activation,
}

impl ExpertShape {
    pub fn n_granules(&self) -> usize {
        self.n_ff.div_ceil(self.granule_rows)
    }

    fn check(&self) {
        let at = [self.gate_at, self.up_at, self.down_at];
        assert!(at.iter().all(|at| at.is_multiple_of(16)), "{at:?} are no multiples of 16");
        assert!(self.granule_rows > 0 && self.granule_rows <= self.n_ff && self.k > 0);
        assert!(self.granule_rows.is_multiple_of(self.down.block_len()));
    }
}

/// Which granules a launch computes, in device memory.
#[derive(Clone, Copy)]
pub struct Chosen<'a> {
    pub n_pairs: usize,
    /// u64 [pairs, granules of an expert]: where each lies; 0 where it is not on the device.
    pub granules: DeviceSlice<'a>,
    /// u32 [pairs]: the experts, whose biases are added.
    pub experts: DeviceSlice<'a>,
}

impl<'a> Chosen<'a> {
    /// Some of the pairs.
    fn range(&self, pairs: Range<usize>, n_granules: usize) -> Chosen<'a> {
        let (row, n_pairs) = (8 * n_granules, pairs.len());
        let granules = self.granules.slice(row * pairs.start..row * pairs.end);
        Chosen { n_pairs, granules, experts: self.experts.slice(4 * pairs.start..4 * pairs.end) }
    }
}

/// Biases on the device: f32 [experts, n_ff] of gate (none where there is no gate) and up,
/// [experts, n_embd] of down.
#[derive(Clone, Copy)]
pub struct DeviceBiases<'a> {
    pub gate: Option<DeviceSlice<'a>>,
    pub up: DeviceSlice<'a>,
    pub down: DeviceSlice<'a>,
}

impl Experts {
    pub fn load(gpu: &Device) -> Result<Experts> {
        Ok(Experts {
            gate_up: TypeKernels::load(gpu, "expert_gate_up", types())?,
            down: TypeKernels::load(gpu, "expert_down", types())?,
            ordered_sum: gpu.kernel("ordered_sum")?,
            pairs_a_launch: GRID_MAX,
        })
    }

    /// `inner`, f32 [pairs, n_ff]: the activated rows of the granules that are there, 0 in those
    /// that are not. `x` gives the activations of the tokens for a type.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `chosen.granules` holds 0 or addresses of granules of this shape, on
    /// multiples of 16 bytes, and with biases `chosen.experts` are among theirs.
    pub unsafe fn gate_up<'a>(
        &self,
        stream: &Stream,
        shape: &ExpertShape,
        chosen: Chosen,
        biases: Option<DeviceBiases>,
        x: impl Fn(TensorType) -> DeviceActs<'a>,
        inner: DeviceSlice,
    ) -> Result<()> {
        let launch = |part: Part, ty| {
            // SAFETY: the caller's promise, passed on.
            unsafe { self.rows(stream, shape, chosen, biases, part, ty, x(ty), inner) }
        };
        if !shape.activation.is_gated() {
            return launch(Part::Up, shape.up);
        }
        if shape.gate == shape.up {
            return launch(Part::GateAndUp, shape.up);
        }
        launch(Part::Gate, shape.gate)?;
        launch(Part::Up, shape.up)
    }

    /// # Safety
    /// As `gate_up`.
    #[allow(clippy::too_many_arguments)] // one kernel's
    unsafe fn rows(
        &self,
        stream: &Stream,
        shape: &ExpertShape,
        chosen: Chosen,
        biases: Option<DeviceBiases>,
        part: Part,
        ty: TensorType,
        x: DeviceActs,
        inner: DeviceSlice,
    ) -> Result<()> {
        shape.check();
        let (n_pairs, n_granules) = (chosen.n_pairs, shape.n_granules());
        assert_eq!((x.kind, x.cols, x.record_cols), (act_kind(ty), shape.n_embd, shape.n_embd));
        assert!(x.tokens * shape.k >= n_pairs, "{n_pairs} pairs of {} tokens", x.tokens);
        assert!(chosen.granules.holds::<u64>(n_pairs * n_granules));
        assert!(chosen.experts.holds::<u32>(n_pairs));
        assert!(inner.holds::<f32>(n_pairs * shape.n_ff));
        let lanes = lanes_a_row(ty, shape.n_embd);
        let tiles = (shape.granule_rows as u32).div_ceil(THREADS / lanes);
        for pairs in self.launches(n_pairs, shape.k) {
            let x = x.token_range(pairs.start / shape.k..pairs.end.div_ceil(shape.k));
            let grid = [tiles, n_granules as u32, pairs.len() as u32];
            let inner = inner.slice(4 * shape.n_ff * pairs.start..4 * shape.n_ff * pairs.end);
            let chosen = chosen.range(pairs, n_granules);
            let args = Args::new().slice(chosen.granules).size(n_granules);
            let args = args.size(shape.granule_rows).size(shape.n_ff).size(shape.n_embd);
            let args = args.u64(shape.gate_at as u64).u64(shape.up_at as u64).u32(lanes);
            let args = args.slice(x.records).size(shape.k).slice(chosen.experts);
            let args = args.optional(biases.and_then(|b| b.gate)).optional(biases.map(|b| b.up));
            let args = args.u32(activation_code(shape.activation)).u32(part as u32).slice(inner);
            let (kernel, block) = (self.gate_up.get(ty), [THREADS, 1, 1]);
            let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
            // SAFETY: the arguments are the kernel's; tables and results are as large as it needs,
            // and what the tables hold is the caller's promise.
            unsafe { stream.launch(&launch)? };
        }
        Ok(())
    }

    /// A block of a grid takes a pair, and a grid has no more of them than `pairs_a_launch`: runs
    /// of whole tokens' pairs.
    fn launches(&self, n_pairs: usize, k: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let most = (self.pairs_a_launch / k).max(1) * k;
        (0..n_pairs).step_by(most).map(move |first| first..n_pairs.min(first + most))
    }

    /// `partial`, f32 [pairs, n_embd]: the granules that are there, added up in index order. A
    /// pair's first granule begins the sum; where it is not among them, what an earlier launch left
    /// is added to.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// As `gate_up`.
    pub unsafe fn down(
        &self,
        stream: &Stream,
        shape: &ExpertShape,
        chosen: Chosen,
        biases: Option<DeviceBiases>,
        inner: DeviceActs,
        partial: DeviceSlice,
    ) -> Result<()> {
        shape.check();
        let (n_pairs, n_granules) = (chosen.n_pairs, shape.n_granules());
        assert_eq!((inner.kind, inner.cols), (act_kind(shape.down), shape.n_ff));
        assert!(inner.record_cols == shape.n_ff && inner.tokens >= n_pairs);
        assert!(chosen.granules.holds::<u64>(n_pairs * n_granules));
        assert!(chosen.experts.holds::<u32>(n_pairs));
        assert!(partial.holds::<f32>(n_pairs * shape.n_embd));
        let lanes = lanes_a_row(shape.down, shape.granule_rows);
        for pairs in self.launches(n_pairs, shape.k) {
            let grid = [(shape.n_embd as u32).div_ceil(THREADS / lanes), pairs.len() as u32, 1];
            let bytes = 4 * shape.n_embd * pairs.start..4 * shape.n_embd * pairs.end;
            let (inner, partial) = (inner.token_range(pairs.clone()), partial.slice(bytes));
            let chosen = chosen.range(pairs, n_granules);
            let args = Args::new().slice(chosen.granules).size(n_granules);
            let args = args.size(shape.granule_rows).size(shape.n_ff).size(shape.n_embd);
            let args = args.u64(shape.down_at as u64).u32(lanes);
            let args = args.slice(inner.records).slice(chosen.experts);
            let args = args.optional(biases.map(|b| b.down)).slice(partial);
            let (kernel, block) = (self.down.get(shape.down), [THREADS, 1, 1]);
            let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
            // SAFETY: the arguments are the kernel's; tables and results are as large as it needs,
            // and what the tables hold is the caller's promise.
            unsafe { stream.launch(&launch)? };
        }
        Ok(())
    }

    /// `y[t] += Σ_rank weights[t, rank] · partial[pair]`, in rank order. `pairs`, u32 [tokens, k],
    /// says where a token has no expert (`NO_EXPERT`), and with `grouped` also which pair it is;
    /// without, it is `t·k + rank`.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `pairs` are among those of `partial`.
    #[allow(clippy::too_many_arguments)] // one kernel's
    pub unsafe fn ordered_sum(
        &self,
        stream: &Stream,
        shape: &ExpertShape,
        n_tokens: usize,
        pairs: DeviceSlice,
        grouped: bool,
        weights: DeviceSlice,
        partial: DeviceSlice,
        y: DeviceSlice,
    ) -> Result<()> {
        let n = n_tokens * shape.k;
        assert!(pairs.holds::<u32>(n) && weights.holds::<f32>(n));
        assert!(y.holds::<f32>(n_tokens * shape.n_embd));
        if n == 0 {
            return Ok(());
        }
        let args = Args::new().slice(pairs).u32(grouped.into()).slice(weights).size(shape.k);
        let args = args.slice(partial).size(shape.n_embd).slice(y);
        let grid = [(shape.n_embd as u32).div_ceil(THREADS), n_tokens as u32, 1];
        let (kernel, block) = (self.ordered_sum, [THREADS, 1, 1]);
        let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's; sizes are asserted, pairs the caller's promise.
        unsafe { stream.launch(&launch) }
    }
}

/// As `kernels/expert.cu` numbers them.
fn activation_code(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::SiluClamped => 1,
        Activation::Relu => 2,
    }
}
