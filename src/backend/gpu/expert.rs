//! Granules of experts for few tokens (`kernels/expert.cu`). A *pair* is a (token, rank); pairs are
//! ordered by token. Twin: `backend::cpu::expert`.

use super::acts::DeviceActs;
use super::mat::TypeKernels;
use super::matvec::{THREADS, lanes_a_row};
use super::{
    Device, DevicePtr, DeviceSlice, GRID_MAX, Grid, Kernel, Stream, kernel_params, u32_of,
};
use crate::Result;
use crate::backend::ops::Activation;
use crate::gguf::TensorType;
use crate::simd::act_kind;
use std::ops::Range;

kernel_params! {
    pub struct GateUpParams[120] {
        granules: DevicePtr,
        n_granules: u32,
        granule_rows: u32,
        n_ff: u32,
        n_embd: u32,
        gate_at: u64,
        up_at: u64,
        lanes: u32,
        k: u32,
        x: DevicePtr,
        experts: DevicePtr,
        gate_bias: DevicePtr,
        up_bias: DevicePtr,
        gate_scale: DevicePtr,
        up_scale: DevicePtr,
        activation: u32,
        products: u32,
        inner: DevicePtr,
        limit: f32,
        up_limit: f32,
    }
}

kernel_params! {
    pub struct DownParams[72] {
        granules: DevicePtr,
        n_granules: u32,
        granule_rows: u32,
        n_ff: u32,
        n_embd: u32,
        down_at: u64,
        inner: DevicePtr,
        experts: DevicePtr,
        bias: DevicePtr,
        partial: DevicePtr,
        lanes: u32,
        unused: u32,
    }
}

kernel_params! {
    pub struct ScalePairsParams[72] {
        x: DevicePtr,
        granules: DevicePtr,
        starts: DevicePtr,
        experts: DevicePtr,
        scales: DevicePtr,
        bias: DevicePtr,
        rows: u32,
        stride: u32,
        bias_stride: u32,
        n_granules: u32,
        n_pairs: u32,
        unused: u32,
    }
}

kernel_params! {
    pub struct OrderedSumParams[64] {
        pairs: DevicePtr,
        grouped: u32,
        k: u32,
        weights: DevicePtr,
        partial: DevicePtr,
        y: DevicePtr,
        x: DevicePtr,
        scale: f32,
        n_embd: u32,
        begins: u32,
        unused: u32,
    }
}

/// The products of a launch of `expert_gate_up`, as `kernels/expert.cu` numbers them.
#[derive(Clone, Copy)]
enum GateUp {
    Both = 0,
    Gate = 1,
    Up = 2,
}

pub struct Experts {
    gate_up: TypeKernels<GateUpParams>,
    down: TypeKernels<DownParams>,
    scale_pairs: Kernel<ScalePairsParams>,
    ordered_sum: Kernel<OrderedSumParams>,
    /// The most pairs of a launch: `GRID_MAX`, or fewer in tests.
    pub pairs_a_launch: usize,
}

/// The shapes of a layer's experts, and of a granule in device memory: `granule_rows` rows of gate
/// and of up (fewer in an expert's last granule) and as many columns of down, each without gaps
/// from a multiple of 16 bytes on.
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
    /// Experts of a token.
    pub k: usize,
    /// Pairs of a token that read one row of input: all, or 1 where each has a row of its own.
    pub pairs_a_row: usize,
    pub activation: Activation,
    /// See `ops::ExpertShape`.
    pub limit: f32,
    pub up_limit: f32,
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

/// The granules that a launch computes, in device memory.
#[derive(Clone, Copy)]
pub struct Chosen<'a> {
    pub n_pairs: usize,
    /// u64 [pairs, granules of an expert]: the address of each, 0 if it is not on the device.
    pub granules: DeviceSlice<'a>,
    /// If the parts of a granule lie apart: tables of the same size with the addresses of rows of
    /// up and of columns of down. `granules` has those of rows of gate then.
    pub apart: Option<[DeviceSlice<'a>; 2]>,
    /// u32 `[pairs]`: the experts, whose biases are added.
    pub experts: DeviceSlice<'a>,
}

impl<'a> Chosen<'a> {
    fn check(&self, shape: &ExpertShape) {
        assert!(self.granules.holds::<u64>(self.n_pairs * shape.n_granules()));
        assert!(self.experts.holds::<u32>(self.n_pairs));
        let n = self.n_pairs * shape.n_granules();
        assert!(self.apart.into_iter().flatten().all(|table| table.holds::<u64>(n)));
    }

    fn of_up(self) -> Chosen<'a> {
        Chosen { granules: self.apart.map_or(self.granules, |[up, _]| up), ..self }
    }

    fn of_down(self) -> Chosen<'a> {
        Chosen { granules: self.apart.map_or(self.granules, |[_, down]| down), ..self }
    }

    /// The offset of a part from the addresses of its table.
    fn at(&self, in_granule: usize) -> u64 {
        if self.apart.is_some() { 0 } else { in_granule as u64 }
    }

    /// Some of the pairs.
    fn range(&self, pairs: &Range<usize>, shape: &ExpertShape) -> Chosen<'a> {
        let (row, n_pairs) = (8 * shape.n_granules(), pairs.len());
        let rows = |table: DeviceSlice<'a>| table.slice(row * pairs.start..row * pairs.end);
        Chosen {
            n_pairs,
            granules: rows(self.granules),
            apart: self.apart.map(|tables| tables.map(rows)),
            experts: self.experts.slice(4 * pairs.start..4 * pairs.end),
        }
    }
}

/// The operands of [`Experts::ordered_sum`].
#[derive(Clone, Copy)]
pub struct OrderedSum<'a> {
    pub n_tokens: usize,
    /// u32 [tokens, k]: `NO_EXPERT` where a token has no expert. Otherwise the pair, if
    /// `is_grouped`; if not, any number, and the pair is `t·k + rank`.
    pub pairs: DeviceSlice<'a>,
    pub is_grouped: bool,
    /// f32 [tokens, k]
    pub weights: DeviceSlice<'a>,
    /// f32 [pairs, n_embd]
    pub partial: DeviceSlice<'a>,
    /// f32 [tokens, n_embd]
    pub y: DeviceSlice<'a>,
    /// Whether the result begins with 0 instead of `y`.
    pub begins: bool,
    /// The residual stream, f32 [tokens, n_embd], to which the result is added, multiplied by a
    /// factor; then it is not stored in `y`.
    pub residual: Option<(DeviceSlice<'a>, f32)>,
}

/// Biases on the device: f32 [experts, n_ff] of gate (none if there is no gate) and up,
/// [experts, n_embd] of down.
#[derive(Clone, Copy)]
pub struct DeviceBiases<'a> {
    pub gate: Option<DeviceSlice<'a>>,
    pub up: DeviceSlice<'a>,
    pub down: DeviceSlice<'a>,
}

/// Factors on the device: f32 `[experts]` each, of gate (none if there is no gate) and up.
#[derive(Clone, Copy)]
pub struct DeviceScales<'a> {
    pub gate: Option<DeviceSlice<'a>>,
    pub up: DeviceSlice<'a>,
}

/// The parts of `ops::ExpertForm` that an `ExpertShape` does not say.
#[derive(Clone, Copy, Default)]
pub struct DeviceForm<'a> {
    pub biases: Option<DeviceBiases<'a>>,
    pub scales: Option<DeviceScales<'a>>,
}

/// Products of a granule's rows of gate or of up, whose pairs are grouped by expert.
#[derive(Clone, Copy)]
pub struct Scaled<'a> {
    /// f32 [pairs, stride], from the granule's first row on
    pub x: DeviceSlice<'a>,
    pub stride: usize,
    /// The granule's.
    pub rows: usize,
    pub n_items: usize,
    pub n_pairs: usize,
    /// u64 [items, n_granules] from the granule's on: 0 where it was not multiplied
    pub granules: DeviceSlice<'a>,
    pub n_granules: usize,
    /// u32 [items + 1]; `None`: one item has all pairs.
    pub starts: Option<DeviceSlice<'a>>,
    /// u32 `[items]`; `None`: item i is expert i.
    pub experts: Option<DeviceSlice<'a>>,
    /// f32 `[experts]`
    pub scales: DeviceSlice<'a>,
    /// f32 [experts, bias_stride], from the granule's first row on
    pub bias: Option<DeviceSlice<'a>>,
    pub bias_stride: usize,
}

impl Experts {
    /// For matrices of these types.
    pub fn load(gpu: &Device, types: &[TensorType]) -> Result<Experts> {
        Ok(Experts {
            gate_up: TypeKernels::load(gpu, "expert_gate_up", types)?,
            down: TypeKernels::load(gpu, "expert_down", types)?,
            scale_pairs: Kernel::find(gpu, "scale_pairs")?,
            ordered_sum: Kernel::find(gpu, "ordered_sum")?,
            pairs_a_launch: GRID_MAX,
        })
    }

    /// `inner`, f32 [pairs, n_ff]: the activated rows of the granules that are on the device, zeros
    /// for the others. `x` gives the activations of the tokens for a type.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `chosen.granules` holds 0 or addresses of granules of this shape, on
    /// multiples of 16 bytes, and with biases or factors `chosen.experts` are among theirs.
    pub unsafe fn gate_up<'a>(
        &self,
        stream: &Stream,
        shape: &ExpertShape,
        chosen: Chosen,
        form: DeviceForm,
        x: impl Fn(TensorType) -> DeviceActs<'a>,
        inner: DeviceSlice,
    ) -> Result<()> {
        shape.check();
        let n_pairs = chosen.n_pairs;
        chosen.check(shape);
        assert!(inner.holds::<f32>(n_pairs * shape.n_ff));
        let launch = |products: GateUp, ty, chosen: Chosen| {
            let x = x(ty);
            assert_eq!((x.kind, x.cols, x.record_cols), (act_kind(ty), shape.n_embd, shape.n_embd));
            let each = shape.pairs_a_row;
            assert!(x.tokens * each >= n_pairs, "{n_pairs} pairs of {} rows", x.tokens);
            let lanes = lanes_a_row(ty, shape.n_embd);
            let tiles = u32_of(shape.granule_rows).div_ceil(THREADS / lanes);
            for pairs in self.launches(n_pairs, shape.k) {
                let tokens = pairs.start / each..pairs.end.div_ceil(each);
                let params = GateUpParams {
                    lanes,
                    x: x.token_range(tokens).records.into(),
                    products: products as u32,
                    inner: rows(inner, shape.n_ff, &pairs).into(),
                    ..gate_up_params(shape, chosen.range(&pairs, shape), form)
                };
                let blocks = [tiles, params.n_granules, u32_of(pairs.len())];
                let grid = Grid::new(blocks, THREADS);
                // SAFETY: tables and results are as large as the kernel needs (asserted); the
                // tables' content is the caller's promise.
                unsafe { stream.launch(self.gate_up.get(ty), grid, &params)? };
            }
            Ok(())
        };
        if !shape.activation.is_gated() {
            return launch(GateUp::Up, shape.up, chosen.of_up());
        }
        if shape.gate == shape.up && chosen.apart.is_none() {
            return launch(GateUp::Both, shape.up, chosen);
        }
        launch(GateUp::Gate, shape.gate, chosen)?;
        launch(GateUp::Up, shape.up, chosen.of_up())
    }

    /// The pairs of each launch: a grid has one block along z for each pair, and at most
    /// `pairs_a_launch`, of whole tokens.
    fn launches(&self, n_pairs: usize, k: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let most = (self.pairs_a_launch / k).max(1) * k;
        (0..n_pairs).step_by(most).map(move |first| first..n_pairs.min(first + most))
    }

    /// `partial`, f32 [pairs, n_embd]: the sums of the granules that are on the device, in index
    /// order. A pair's first granule begins the sum; without it, the sum continues what an earlier
    /// launch left.
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
        let n_pairs = chosen.n_pairs;
        chosen.check(shape);
        assert_eq!((inner.kind, inner.cols), (act_kind(shape.down), shape.n_ff));
        assert!(inner.record_cols == shape.n_ff && inner.tokens >= n_pairs);
        assert!(partial.holds::<f32>(n_pairs * shape.n_embd));
        let lanes = lanes_a_row(shape.down, shape.granule_rows);
        for pairs in self.launches(n_pairs, shape.k) {
            let chosen = chosen.of_down().range(&pairs, shape);
            let params = DownParams {
                granules: chosen.granules.into(),
                n_granules: u32_of(shape.n_granules()),
                granule_rows: u32_of(shape.granule_rows),
                n_ff: u32_of(shape.n_ff),
                n_embd: u32_of(shape.n_embd),
                down_at: chosen.at(shape.down_at),
                inner: inner.token_range(pairs.clone()).records.into(),
                experts: chosen.experts.into(),
                bias: biases.map(|b| b.down).into(),
                partial: rows(partial, shape.n_embd, &pairs).into(),
                lanes,
                unused: 0,
            };
            let blocks = [params.n_embd.div_ceil(THREADS / lanes), u32_of(pairs.len()), 1];
            // SAFETY: tables and results are as large as the kernel needs (asserted); the tables'
            // content is the caller's promise.
            unsafe {
                stream.launch(self.down.get(shape.down), Grid::new(blocks, THREADS), &params)?
            };
        }
        Ok(())
    }

    /// `x = scale · x + bias` of each pair whose granule was multiplied.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `starts` ascends to `n_pairs` and `experts` have scales, and biases if
    /// there are some.
    pub unsafe fn scale_pairs(&self, stream: &Stream, scaled: Scaled) -> Result<()> {
        let Scaled { x, stride, rows, n_items, n_pairs, .. } = scaled;
        if n_items == 0 || n_pairs == 0 || rows == 0 {
            return Ok(());
        }
        assert!(rows <= stride && x.holds::<f32>((n_pairs - 1) * stride + rows));
        assert!(scaled.granules.holds::<u64>((n_items - 1) * scaled.n_granules + 1));
        assert!(scaled.experts.is_none_or(|experts| experts.holds::<u32>(n_items)));
        assert!(scaled.starts.is_none_or(|starts| starts.holds::<u32>(n_items + 1)));
        assert!(n_items == 1 || scaled.starts.is_some(), "the pairs of {n_items} items");
        let n_experts = scaled.scales.count::<f32>();
        let n_biases = (n_experts - 1) * scaled.bias_stride + rows;
        assert!(scaled.bias.is_none_or(|bias| bias.holds::<f32>(n_biases)));
        let params = ScalePairsParams {
            x: x.into(),
            granules: scaled.granules.into(),
            starts: scaled.starts.into(),
            experts: scaled.experts.into(),
            scales: scaled.scales.into(),
            bias: scaled.bias.into(),
            rows: u32_of(rows),
            stride: u32_of(stride),
            bias_stride: u32_of(scaled.bias_stride),
            n_granules: u32_of(scaled.n_granules),
            n_pairs: u32_of(n_pairs),
            unused: 0,
        };
        let blocks = [params.rows.div_ceil(THREADS), u32_of(n_items), 1];
        // SAFETY: sizes are asserted; the tables' content is the caller's promise.
        unsafe { stream.launch(self.scale_pairs, Grid::new(blocks, THREADS), &params) }
    }

    /// `y[t] += Σ_rank weights[t, rank] · partial[pair]`, in rank order, or `y[t] =` this, or
    /// `x[t] += factor · y[t]` of it.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `sum.pairs` are among those of `sum.partial`.
    pub unsafe fn ordered_sum(
        &self,
        stream: &Stream,
        shape: &ExpertShape,
        sum: OrderedSum,
    ) -> Result<()> {
        let n = sum.n_tokens * shape.k;
        assert!(sum.pairs.holds::<u32>(n) && sum.weights.holds::<f32>(n));
        assert!(sum.y.holds::<f32>(sum.n_tokens * shape.n_embd));
        if n == 0 {
            return Ok(());
        }
        let (x, scale) = sum.residual.unzip();
        assert!(x.is_none_or(|x| x.holds::<f32>(sum.n_tokens * shape.n_embd)));
        let params = OrderedSumParams {
            pairs: sum.pairs.into(),
            grouped: sum.is_grouped.into(),
            k: u32_of(shape.k),
            weights: sum.weights.into(),
            partial: sum.partial.into(),
            y: sum.y.into(),
            x: x.into(),
            scale: scale.unwrap_or_default(),
            n_embd: u32_of(shape.n_embd),
            begins: sum.begins.into(),
            unused: 0,
        };
        let blocks = [params.n_embd.div_ceil(THREADS), u32_of(sum.n_tokens), 1];
        // SAFETY: sizes are asserted; the pairs are the caller's promise.
        unsafe { stream.launch(self.ordered_sum, Grid::new(blocks, THREADS), &params) }
    }
}

/// Some rows of f32 [pairs, n].
fn rows<'a>(data: DeviceSlice<'a>, n: usize, pairs: &Range<usize>) -> DeviceSlice<'a> {
    data.slice(4 * n * pairs.start..4 * n * pairs.end)
}

/// The parameters without activations, products and results.
fn gate_up_params(
    shape: &ExpertShape,
    chosen: Chosen,
    DeviceForm { biases, scales }: DeviceForm,
) -> GateUpParams {
    GateUpParams {
        granules: chosen.granules.into(),
        n_granules: u32_of(shape.n_granules()),
        granule_rows: u32_of(shape.granule_rows),
        n_ff: u32_of(shape.n_ff),
        n_embd: u32_of(shape.n_embd),
        gate_at: chosen.at(shape.gate_at),
        up_at: chosen.at(shape.up_at),
        k: u32_of(shape.pairs_a_row),
        experts: chosen.experts.into(),
        gate_bias: biases.and_then(|b| b.gate).into(),
        up_bias: biases.map(|b| b.up).into(),
        gate_scale: scales.and_then(|s| s.gate).into(),
        up_scale: scales.map(|s| s.up).into(),
        activation: activation_code(shape.activation),
        limit: shape.limit,
        up_limit: shape.up_limit,
        ..Default::default()
    }
}

/// The numbers that `kernels/expert.cu` has for activations.
fn activation_code(activation: Activation) -> u32 {
    match activation {
        Activation::ReluGated => 3,
        Activation::Gelu => 4,
        Activation::SiluLimited => 5,
        Activation::SiluCapped => 6,
        Activation::ReluSquared => 7,
        Activation::Situ => 8,
        Activation::Silu => 0,
        Activation::SiluClamped => 1,
        Activation::Relu => 2,
        Activation::GeluPlain | Activation::SiluPlain => {
            unreachable!("devices have no kernel for it")
        }
    }
}
