//! Granules of experts, for one token or for many grouped by expert:
//! `Down[:, g] · (silu(Gate[g]·x) ⊙ Up[g]·x)`, say, added up in index order within an expert and
//! in rank order over a token's experts. So neither the order in which granules arrive nor who
//! computes them can change a bit of the sum.

mod low_rank;

use std::ops::Range;

use super::acts::{ActSet, Kinds};
use super::grid::TokenParts;
use super::{Cpu, SERIAL_WORK, SharedOut, ThreadScratch};
use crate::backend::ops::{Activation, Demand, ExpertBiases, ExpertForm, NO_PAIR};
use crate::simd::{Floats, Kernels, MatRef, Out};
use low_rank::PairRanks;

/// A granule that can be computed.
#[derive(Clone)]
pub struct GranuleMats<'a> {
    /// Slot of the demand.
    pub slot: usize,
    /// Intermediate rows of the expert.
    pub rows: Range<usize>,
    /// [rows.len(), n_embd], as `up`; experts whose activation takes no gate have none.
    pub gate: Option<MatRef<'a>>,
    pub up: MatRef<'a>,
    /// [n_embd, rows.len()]
    pub down: MatRef<'a>,
}

/// Intermediate results of one layer's experts; reused from layer to layer.
#[derive(Default)]
pub struct ExpertBuffers {
    n_ff: usize,
    n_embd: usize,
    /// [pairs, n_ff]
    inner: Floats,
    inner_acts: ActSet,
    /// [pairs, n_embd]: sum of the granules so far
    partial: Floats,
    items: Items,
    ranks: PairRanks,
}

impl ExpertBuffers {
    /// The result of each pair, [pairs, n_embd], once all granules are computed.
    pub fn results(&mut self) -> &mut [f32] {
        &mut self.partial
    }
}

/// The work of a region: an item is a granule, or an expert.
#[derive(Default)]
struct Items(Vec<Item>);

/// Rows times pairs of one expert.
struct Item {
    granules: Range<usize>,
    rows: usize,
    /// The expert's pairs, in parts.
    parts: TokenParts,
    /// End of its rows, part after part, counted from the first item's first row.
    end: usize,
}

impl Items {
    /// A granule is an item.
    fn granules(&mut self, granules: &[GranuleMats], demand: &Demand) {
        self.0.clear();
        for (i, g) in granules.iter().enumerate() {
            self.push(i..i + 1, g.rows.len(), demand.pairs(g.slot).len());
        }
    }

    /// An expert is an item, of `n_rows` rows.
    fn experts(&mut self, granules: &[GranuleMats], demand: &Demand, n_rows: usize) {
        self.0.clear();
        let mut first = 0;
        for of_expert in granules.chunk_by(|a, b| a.slot == b.slot) {
            debug_assert!(of_expert.windows(2).all(|w| w[0].rows.end == w[1].rows.start));
            let next = first + of_expert.len();
            self.push(first..next, n_rows, demand.pairs(of_expert[0].slot).len());
            first = next;
        }
    }

    fn push(&mut self, granules: Range<usize>, rows: usize, pairs: usize) {
        let parts = TokenParts::new(pairs);
        let end = self.end() + rows * parts.count();
        self.0.push(Item { granules, rows, parts, end });
    }

    fn end(&self) -> usize {
        self.0.last().map_or(0, |item| item.end)
    }
}

impl ExpertBuffers {
    /// Begins a layer with `n_pairs` of the demand; `down` is the form that down's type reads.
    pub fn begin(&mut self, n_pairs: usize, n_ff: usize, n_embd: usize, down: Kinds) {
        (self.n_ff, self.n_embd) = (n_ff, n_embd);
        self.inner.resize(n_pairs * n_ff);
        self.partial.resize(n_pairs * n_embd);
        self.inner_acts.resize(down, n_pairs, n_ff);
    }

    /// Makes the activations the results of experts without down.
    pub fn end_without_down(&mut self) {
        std::mem::swap(&mut self.inner, &mut self.partial);
    }

    pub fn n_ff(&self) -> usize {
        self.n_ff
    }

    /// The input of an expert's down matrix for a pair, once all of its granules are computed:
    /// `[n_ff]`.
    pub fn inner(&self, pair: usize) -> &[f32] {
        &self.inner[pair * self.n_ff..][..self.n_ff]
    }

    /// The sums over the granules of these pairs' experts: [pairs, n_embd].
    pub fn partial(&self, pairs: Range<usize>) -> &[f32] {
        &self.partial[pairs.start * self.n_embd..pairs.end * self.n_embd]
    }

    /// The places for sums of pairs whose experts are computed elsewhere.
    pub fn partial_mut(&mut self, pairs: Range<usize>) -> &mut [f32] {
        &mut self.partial[pairs.start * self.n_embd..pairs.end * self.n_embd]
    }
}

impl Cpu {
    /// Computes `granules` and adds them to the partial sums. Granules of one expert come in index
    /// order, here and from call to call, and next to each other.
    pub fn expert_granules(
        &self,
        granules: &[GranuleMats],
        demand: &Demand,
        form: ExpertForm,
        x: &ActSet,
        buffers: &mut ExpertBuffers,
    ) {
        self.gate_up(granules, demand, form, x, buffers);
        self.quantize_inner(granules, demand, buffers);
        self.down(granules, demand, form.biases, buffers);
    }

    /// `inner[pair, row] = activation(gate[row]·x, up[row]·x)`, of the latter alone without a gate;
    /// the results of experts without down once [`ExpertBuffers::end_without_down`] is called
    pub fn gate_up(
        &self,
        granules: &[GranuleMats],
        demand: &Demand,
        form: ExpertForm,
        x: &ActSet,
        buffers: &mut ExpertBuffers,
    ) {
        let n_ff = buffers.n_ff;
        let (inner, ranks) = (SharedOut::new(&mut buffers.inner), &buffers.ranks);
        buffers.items.granules(granules, demand);
        self.pieces(&buffers.items, &|scratch, g, rows, pairs| {
            let granule = &granules[g.start];
            let pairs = within(demand.pairs(granule.slot), pairs);
            let tokens = &demand.inputs()[pairs.clone()];
            let n = rows.len();
            let (kernels, products) = scratch.split(2 * tokens.len() * n);
            let (gate, up) = products.split_at_mut(tokens.len() * n);
            debug_assert_eq!(granule.gate.is_some(), form.activation.is_gated());
            for (mat, out) in [(granule.gate, &mut *gate), (Some(granule.up), &mut *up)] {
                let Some(mat) = mat else { continue };
                let acts = x.view(mat.ty).select(tokens);
                self.kernels.matmul_all(mat.row_range(rows.clone()), acts, out, kernels);
            }
            let first = granule.rows.start + rows.start;
            if let Some(scales) = form.scales {
                let expert = demand.experts[granule.slot] as usize;
                for (products, scales) in [(&mut *gate, &scales.gate), (&mut *up, &scales.up)] {
                    if let Some(scale) = scales.get(expert) {
                        products.iter_mut().for_each(|p| *p *= scale);
                    }
                }
            }
            if let Some(biases) = form.biases {
                let at = demand.experts[granule.slot] as usize * n_ff + first;
                for (products, bias) in [(&mut *gate, &biases.gate), (&mut *up, &biases.up)] {
                    if !bias.is_empty() {
                        let products = products.chunks_exact_mut(n);
                        products.for_each(|p| self.kernels.add(p, &bias[at..][..n]));
                    }
                }
            }
            for (i, pair) in pairs.enumerate() {
                // SAFETY: a pair's row of a granule is in one piece.
                let out = unsafe { inner.slice(pair * n_ff + first, n) };
                let (gate, up) = (&mut gate[i * n..][..n], &mut up[i * n..][..n]);
                if let Some(adapted) = &form.adapted {
                    ranks.add(self.kernels, adapted, pair, &(first..first + n), [gate, up]);
                }
                activate(self.kernels, form, [gate, up], out);
            }
        });
    }

    fn quantize_inner(
        &self,
        granules: &[GranuleMats],
        demand: &Demand,
        buffers: &mut ExpertBuffers,
    ) {
        let n_ff = buffers.n_ff;
        let inner = &buffers.inner;
        let writers = buffers.inner_acts.writers();
        let serial = demand.n_pairs() * n_ff <= SERIAL_WORK;
        let chunk = if serial { granules.len() } else { 1 };
        self.chunks(granules.len(), chunk, &|_, range| {
            for g in &granules[range] {
                let pairs = demand.pairs(g.slot);
                let src = &inner[pairs.start * n_ff..];
                // SAFETY: granules of one expert have rows of their own, experts pairs of theirs.
                unsafe { writers.store(self.kernels, pairs, g.rows.clone(), src, n_ff) }
            }
        });
    }

    /// partial[pair] += down · inner[pair], granule by granule in order.
    fn down(
        &self,
        granules: &[GranuleMats],
        demand: &Demand,
        biases: Option<&ExpertBiases>,
        buffers: &mut ExpertBuffers,
    ) {
        let n_embd = buffers.n_embd;
        let acts = &buffers.inner_acts;
        let partial = SharedOut::new(&mut buffers.partial);
        buffers.items.experts(granules, demand, n_embd);
        self.pieces(&buffers.items, &|scratch, of_expert, rows, pairs| {
            let of_expert = &granules[of_expert];
            let slot = of_expert[0].slot;
            let pairs = within(demand.pairs(slot), pairs);
            let expert = demand.experts[slot] as usize;
            let n = rows.len();
            let (kernels, product) = scratch.split(pairs.len() * n);
            let columns = of_expert.iter().map(|granule| granule.down);
            let many = self.kernels.sums_granules(of_expert[0].down.ty) && biases.is_none();
            let sums = (pairs.len() == 1 || many) && of_expert[0].rows.start == 0;
            if let Some((mat, width)) = sums.then(|| MatRef::joined(columns)).flatten() {
                let acts = acts.view(mat.ty).token_range(pairs.clone()).column_range(0..mat.cols);
                let out = partial.rows(pairs.start * n_embd, n_embd);
                if let Some(biases) = biases {
                    let bias = &biases.down[expert * n_embd + rows.start..][..n];
                    let first = pairs.start * n_embd + rows.start;
                    // SAFETY: a pair's row is in one piece. The first granule plus its bias is the
                    // bias plus the granule.
                    unsafe { partial.slice(first, n) }.copy_from_slice(bias);
                }
                let product = (mat, width, biases.is_some());
                // SAFETY: a pair's row is in one piece, and what the sums are added to is there.
                return unsafe { self.kernels.granule_sums(product, rows, acts, out, kernels) };
            }
            for granule in of_expert {
                let acts = acts.view(granule.down.ty).token_range(pairs.clone());
                let acts = acts.column_range(granule.rows.clone());
                if granule.rows.start == 0 {
                    let out = Out::near(partial.at(pairs.start * n_embd), n_embd);
                    // SAFETY: a pair's row is in one piece; the first granule writes it.
                    unsafe { self.kernels.matmul(granule.down, rows.clone(), acts, out, kernels) };
                } else {
                    let mat = granule.down.row_range(rows.clone());
                    self.kernels.matmul_all(mat, acts, product, kernels);
                }
                for (i, pair) in pairs.clone().enumerate() {
                    // SAFETY: a pair's row is in one piece.
                    let out = unsafe { partial.slice(pair * n_embd + rows.start, n) };
                    if granule.rows.start != 0 {
                        self.kernels.add(out, &product[i * n..][..n]);
                    } else if let Some(biases) = biases {
                        let bias = &biases.down[expert * n_embd + rows.start..][..n];
                        self.kernels.add(out, bias);
                    }
                }
            }
        });
    }

    /// `y[t] += Σ_rank weights[t, rank] · partial[t, rank]`, summed in rank order first. `y` is
    /// [tokens, n_embd], `weights` [tokens, k].
    pub fn ordered_sum(
        &self,
        demand: &Demand,
        weights: &[f32],
        buffers: &ExpertBuffers,
        y: &mut [f32],
    ) {
        let (k, n_embd) = (demand.k(), buffers.n_embd);
        let n_tokens = weights.len() / k;
        assert!(y.len() == n_tokens * n_embd && demand.places().len() == weights.len());
        let shared = SharedOut::new(y);
        self.chunks(n_tokens, self.token_chunk(n_tokens, n_embd), &|scratch, range| {
            let (_, sum) = scratch.split(n_embd);
            for t in range {
                sum.fill(0.0);
                for rank in t * k..(t + 1) * k {
                    let pair = demand.places()[rank];
                    if pair == NO_PAIR {
                        continue;
                    }
                    let partial = &buffers.partial[pair as usize * n_embd..];
                    self.kernels.axpy(sum, weights[rank], &partial[..n_embd]);
                }
                // SAFETY: each token is in one chunk.
                self.kernels.add(unsafe { shared.slice(t * n_embd, n_embd) }, sum);
            }
        });
    }

    /// Runs `f(scratch, granules, rows, pairs)` over the rows of all items, `pairs` counted from
    /// the expert's first, in pieces that do not cross from one item to the next, or from one part
    /// of its pairs to the next. A piece stays small enough for its products to stay in the second
    /// cache.
    fn pieces(&self, items: &Items, f: &Piece) {
        let total = items.end();
        let parts: usize = items.0.iter().map(|item| item.parts.count()).sum();
        let pairs: usize = items.0.iter().map(|item| item.parts.all()).sum();
        let most = PIECE_PRODUCTS / pairs.div_ceil(parts.max(1)).max(1);
        let chunk = self.row_chunk(total, usize::MAX).min(most.next_multiple_of(64));
        self.chunks(total, chunk, &|scratch, range| {
            let mut i = items.0.partition_point(|item| item.end <= range.start);
            let mut at = range.start;
            while at < range.end {
                let item = &items.0[i];
                let first = item.end - item.rows * item.parts.count();
                let end = item.end.min(range.end);
                for (rows, pairs) in item.parts.pieces(item.rows, at - first..end - first) {
                    f(scratch, item.granules.clone(), rows, pairs);
                }
                (at, i) = (end, i + 1);
            }
        });
    }
}

/// Computes a piece: see [`Cpu::pieces`].
type Piece<'a> = dyn Fn(&mut ThreadScratch, Range<usize>, Range<usize>, Range<usize>) + Sync + 'a;

/// A part of a range, counted from its start.
fn within(all: Range<usize>, part: Range<usize>) -> Range<usize> {
    debug_assert!(part.end <= all.len());
    all.start + part.start..all.start + part.end
}

/// Products of a piece, of which gate and up have as many each: half a MiB in all.
const PIECE_PRODUCTS: usize = 64 << 10;

/// out = activation(gate, up), or of the latter alone; changes both.
fn activate(kernels: &Kernels, form: ExpertForm, [gate, up]: [&mut [f32]; 2], out: &mut [f32]) {
    match form.activation {
        Activation::Silu => kernels.swiglu(gate, up, out),
        Activation::SiluClamped => swiglu_clamped(kernels, gate, up, out),
        Activation::Relu => out.iter_mut().zip(up).for_each(|(o, u)| *o = relu(*u)),
        Activation::ReluSquared => relu_squared(up, out),
        Activation::ReluGated => reglu(gate, up, out),
        Activation::GeluPlain => gelu(up, out),
        Activation::SiluPlain => {
            gate.fill(1.0);
            kernels.swiglu(up, gate, out);
        }
        Activation::Gelu => geglu(kernels, gate, up, out),
        Activation::SiluLimited => swiglu_limited(kernels, form.limit, gate, up, out),
        Activation::SiluCapped => swiglu_capped(kernels, form.limit, gate, up, out),
        Activation::Situ => situ(kernels, [form.limit, form.up_limit], gate, up, out),
    }
}

/// See [`Activation::Relu`]. Not `f32::max`, which may give -0 for -0 or not, as it is compiled.
pub fn relu(x: f32) -> f32 {
    if x > 0.0 { x } else { 0.0 }
}

/// See [`Activation::ReluSquared`].
pub fn relu_squared(up: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(up).for_each(|(o, u)| *o = relu(*u) * relu(*u));
}

/// See [`Activation::SiluClamped`]; changes `gate`.
fn swiglu_clamped(kernels: &Kernels, gate: &mut [f32], up: &[f32], out: &mut [f32]) {
    gate.iter_mut().for_each(|g| *g = g.min(7.0));
    out.iter_mut().zip(&*gate).for_each(|(o, g)| *o = 1.702 * g);
    kernels.sigmoid(out);
    for ((o, g), u) in out.iter_mut().zip(&*gate).zip(up) {
        *o = g * *o * (u.clamp(-7.0, 7.0) + 1.0);
    }
}

/// See [`Activation::GeluPlain`].
pub fn gelu(up: &[f32], out: &mut [f32]) {
    for (o, u) in out.iter_mut().zip(up) {
        let x = f64::from(*u);
        *o = (0.5 * x * erfc(-x * std::f64::consts::FRAC_1_SQRT_2)) as f32;
    }
}

/// The complementary error function, within 1.2·10⁻⁷ of itself: a Chebyshev fit of its logarithm
/// (Press et al., Numerical Recipes, section 6.2).
fn erfc(x: f64) -> f64 {
    const FIT: [f64; 10] = [
        -1.265_512_23,
        1.000_023_68,
        0.374_091_96,
        0.096_784_18,
        -0.186_288_06,
        0.278_868_07,
        -1.135_203_98,
        1.488_515_87,
        -0.822_152_23,
        0.170_872_77,
    ];
    let t = 1.0 / (1.0 + 0.5 * x.abs());
    let fit = FIT.iter().rev().fold(0.0, |sum, c| sum * t + c);
    let tail = t * (fit - x * x).exp();
    if x >= 0.0 { tail } else { 2.0 - tail }
}

/// See [`Activation::ReluGated`].
pub fn reglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(gate.iter().zip(up)).for_each(|(o, (g, u))| *o = relu(*g) * u);
}

/// See [`Activation::Gelu`]: each product and sum is rounded.
pub fn geglu(kernels: &Kernels, gate: &[f32], up: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(gate).for_each(|(o, g)| *o = GELU_SLOPE * (g + GELU_CUBE * (g * g * g)));
    kernels.sigmoid(out);
    out.iter_mut().zip(gate.iter().zip(up)).for_each(|(o, (g, u))| *o = g * *o * u);
}

/// √(8/π) and the weight of the cube.
const GELU_SLOPE: f32 = 1.595_769_1;
const GELU_CUBE: f32 = 0.044_715;

/// See [`Activation::SiluLimited`]; changes `gate` and `up`.
pub fn swiglu_limited(
    kernels: &Kernels,
    limit: f32,
    gate: &mut [f32],
    up: &mut [f32],
    out: &mut [f32],
) {
    gate.iter_mut().for_each(|g| *g = g.min(limit));
    up.iter_mut().for_each(|u| *u = u.clamp(-limit, limit));
    kernels.swiglu(gate, up, out);
}

/// See [`Activation::SiluCapped`].
pub fn swiglu_capped(kernels: &Kernels, limit: f32, gate: &[f32], up: &[f32], out: &mut [f32]) {
    out.copy_from_slice(gate);
    kernels.sigmoid(out);
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = (g * *o).min(limit) * u.clamp(-limit, limit);
    }
}

/// See [`Activation::Situ`]; changes `gate` and `up`.
pub fn situ(
    kernels: &Kernels,
    [limit, up_limit]: [f32; 2],
    gate: &mut [f32],
    up: &mut [f32],
    out: &mut [f32],
) {
    out.copy_from_slice(gate);
    kernels.sigmoid(out);
    kernels.soft_cap(gate, limit);
    if up_limit > 0.0 {
        kernels.soft_cap(up, up_limit);
    }
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = *g * *o * *u;
    }
}

#[cfg(test)]
mod tests;
