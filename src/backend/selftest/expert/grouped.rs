//! Prompts: pairs grouped by expert; a launch for gate and one for up, and one for each granule of
//! down.

use super::Kernels;
use super::layer::{Layer, N_EXPERTS, Tokens};
use crate::Result;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::acts::{DeviceActs, record_bytes};
use crate::backend::gpu::expert::{ExpertShape, OrderedSum, Scaled};
use crate::backend::gpu::matmul::{GroupBias, Groups, TILE_TOKENS, tile_kind};
use crate::backend::ops::tiles;
use crate::backend::selftest::bench::Bench;
use crate::backend::selftest::data::Random;
use crate::backend::selftest::report::Row;
use crate::gguf::TensorType;
use crate::simd::act_kind;

const N_TOKENS: u32 = 40;

/// A layer with biases. Expert 1 has more tokens than a tile has columns, expert 2 few.
pub fn compare(bench: &Bench, kernels: &Kernels, row: &mut Row, layer: &Layer) -> Result<()> {
    let chosen: Vec<u32> =
        (0..N_TOKENS).flat_map(|t| [1, if t % 9 == 0 { 2 } else { 0 }]).collect();
    let tokens = Tokens::new(bench, layer, &chosen);
    let expected = layer.on_cpu(bench, &tokens);
    let slots = layer.upload(bench)?;
    let grouping = Grouping::new(bench, &layer.shape, &chosen, &slots)?;
    let call = Call { bench, kernels, layer, tokens: &tokens, grouping: &grouping };
    row.bits(layer.name(), &call.run()?, &expected);
    Ok(())
}

/// Pairs in the order of their experts.
pub struct Grouping {
    /// Pair → place among [tokens, ranks].
    pub order: Vec<usize>,
    /// Tiles of both kinds, with one in the middle that has no pairs.
    tiles: [DeviceBuffer; 2],
    /// u32 [pairs] and [tokens, k].
    pub tokens: DeviceBuffer,
    pub places: DeviceBuffer,
    /// u64 [experts, granules]
    pub table: DeviceBuffer,
    n_granules: usize,
    /// u32 [experts]: 0, 1, 2.
    pub experts: DeviceBuffer,
}

impl Grouping {
    pub fn new(
        bench: &Bench,
        s: &ExpertShape,
        chosen: &[u32],
        slots: &[Vec<DeviceBuffer>],
    ) -> Result<Self> {
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by_key(|i| chosen[*i]);
        let mut places = vec![0u32; chosen.len()];
        order.iter().enumerate().for_each(|(pair, i)| places[*i] = pair as u32);
        let tokens: Vec<u32> = order.iter().map(|i| (i / s.k) as u32).collect();
        let below = |e: u32| chosen.iter().filter(|c| **c < e).count();
        let starts: Vec<usize> = (0..=N_EXPERTS as u32).map(below).collect();
        let [wide, narrow] = TILE_TOKENS.map(|size| {
            let mut words = tiles(&starts, size, |_| true);
            words.splice(4..4, [0; 4]);
            bench.up_u32(&words)
        });
        let addresses = slots.iter().flatten().map(|slot| slot.all().address());
        let addresses: Vec<u64> = addresses.collect();
        let ids: Vec<u32> = (0..N_EXPERTS as u32).collect();
        Ok(Grouping {
            order,
            tiles: [wide?, narrow?],
            tokens: bench.up_u32(&tokens)?,
            places: bench.up_u32(&places)?,
            table: bench.up_u64(&addresses)?,
            n_granules: s.n_granules(),
            experts: bench.up_u32(&ids)?,
        })
    }

    /// A matrix whose first granule is `granule`.
    pub fn groups(&self, ty: TensorType, granule: usize, [rows, cols]: [usize; 2]) -> Groups<'_> {
        Groups {
            ty,
            rows,
            cols,
            granule_rows: rows,
            n_items: N_EXPERTS,
            n_pairs: self.order.len(),
            matrices: self.table.slice(8 * granule..self.table.len()),
            n_granules: self.n_granules,
            matrix_at: 0,
            tiles: Some(self.tiles[tile_kind(ty)].all()),
            tokens: None,
            bias: None,
            accumulate: false,
        }
    }
}

pub struct Call<'a> {
    pub bench: &'a Bench,
    pub kernels: &'a Kernels,
    pub layer: &'a Layer,
    pub tokens: &'a Tokens,
    pub grouping: &'a Grouping,
}

impl Call<'_> {
    fn run(&self) -> Result<Vec<f32>> {
        self.sum(&self.down(&self.inner()?)?)
    }

    /// The tokens' sums of what down gives: f32 [pairs, n_embd].
    pub fn sum(&self, partial: &DeviceBuffer) -> Result<Vec<f32>> {
        let Call { bench, kernels, layer, tokens, grouping } = *self;
        let s = &layer.shape;
        let y = bench.up_f32(&vec![0.0; tokens.n * s.n_embd])?;
        let weights = bench.up_f32(&tokens.weights)?;
        let sum = OrderedSum {
            n_tokens: tokens.n,
            pairs: grouping.places.all(),
            is_grouped: true,
            weights: weights.all(),
            partial: partial.all(),
            y: y.all(),
            begins: false,
            residual: None,
        };
        // SAFETY: the places are those of the pairs.
        unsafe { kernels.experts.ordered_sum(&bench.stream, s, sum)? };
        bench.down_f32(&y)
    }

    /// The activated rows of all pairs. The activation has a kernel of its own: it is computed on
    /// the CPU here.
    fn inner(&self) -> Result<Vec<f32>> {
        let Call { bench, kernels, layer, tokens, grouping } = *self;
        let (s, n_pairs) = (&layer.shape, grouping.order.len());
        let x = tokens.records(bench, s.up)?;
        let x = DeviceActs::new(act_kind(s.up), tokens.n, s.n_embd, x.all());
        let sums = [bench.empty(4 * n_pairs * s.n_ff)?, bench.empty(4 * n_pairs * s.n_ff)?];
        let biases = layer.biases.as_ref().expect("a layer with biases");
        let biases = [bench.up_f32(&biases.gate)?, bench.up_f32(&biases.up)?];
        let mats = [(s.gate, s.gate_at), (s.up, s.up_at)];
        for ((ty, matrix_at), (out, bias)) in mats.into_iter().zip(sums.iter().zip(&biases)) {
            let (experts, values) = (grouping.experts.all(), bias.all());
            let groups = Groups {
                matrix_at,
                granule_rows: s.granule_rows,
                tokens: Some(grouping.tokens.all()),
                bias: Some(GroupBias { experts: Some(experts), values, stride: s.n_ff }),
                ..grouping.groups(ty, 0, [s.n_ff, s.n_embd])
            };
            // SAFETY: the tables are those of the slots, of pairs and of their tokens.
            unsafe { kernels.products.grouped(&bench.stream, groups, x, out.all(), s.n_ff) }?;
        }
        let (gate, up) = (bench.down_f32(&sums[0])?, bench.down_f32(&sums[1])?);
        let mut inner = vec![0.0; gate.len()];
        bench.cpu.kernels.swiglu(&gate, &up, &mut inner);
        Ok(inner)
    }

    /// down · inner of every pair, granule by granule; the first begins with the bias.
    fn down(&self, inner: &[f32]) -> Result<DeviceBuffer> {
        let Call { bench, kernels, layer, grouping, .. } = *self;
        let (s, n_pairs, stream) = (&layer.shape, grouping.order.len(), &bench.stream);
        let kind = act_kind(s.down);
        let records = bench.empty(n_pairs * record_bytes(kind, s.n_ff))?;
        let acts = DeviceActs::new(kind, n_pairs, s.n_ff, records.all());
        let inner = bench.up_f32(inner)?;
        kernels.quantize.store(stream, inner.all(), s.n_ff, acts)?;
        let bias = bench.up_f32(&layer.biases.as_ref().expect("a layer with biases").down)?;
        let partial = bench.empty(4 * n_pairs * s.n_embd)?;
        for g in 0..s.n_granules() {
            let cols = layer.rows(g);
            let bias = GroupBias { experts: None, values: bias.all(), stride: s.n_embd };
            let groups = Groups {
                matrix_at: s.down_at,
                bias: (g == 0).then_some(bias),
                accumulate: g > 0,
                ..grouping.groups(s.down, g, [s.n_embd, cols.len()])
            };
            let acts = acts.column_range(cols);
            // SAFETY: the tables are those of the slots and of pairs.
            unsafe { kernels.products.grouped(stream, groups, acts, partial.all(), s.n_embd) }?;
        }
        stream.synchronize()?;
        Ok(partial)
    }
}

/// Products of three items, of which one was not multiplied, with factors and with or without
/// biases; columns behind the granule's rows stay as they are.
pub fn scale(bench: &Bench, kernels: &Kernels, row: &mut Row) -> Result<()> {
    // The second of two granules.
    let (starts, experts, here) = ([0u32, 3, 4, 9], [2u32, 0, 1], [0u64, 1, 1, 0, 0, 1]);
    for (rows, stride) in [(1, 1), (40, 43), (300, 512)] {
        let mut random = Random(rows as u64);
        let [x, scales, bias] = [9 * stride, 3, 3 * stride].map(|n| random.floats(n));
        let [scales_up, bias_up] = [&scales, &bias].map(|v| bench.up_f32(v));
        let (scales_up, bias_up, granules) = (scales_up?, bias_up?, bench.up_u64(&here)?);
        let (starts_up, experts_up) = (bench.up_u32(&starts)?, bench.up_u32(&experts)?);
        for is_biased in [false, true] {
            let x_up = bench.up_f32(&x)?;
            let scaled = Scaled {
                x: x_up.all(),
                stride,
                rows,
                n_items: 3,
                n_pairs: 9,
                granules: granules.slice(8..48),
                n_granules: 2,
                starts: Some(starts_up.all()),
                experts: Some(experts_up.all()),
                scales: scales_up.all(),
                bias: is_biased.then(|| bias_up.all()),
                bias_stride: stride,
            };
            // SAFETY: the starts ascend to the number of pairs, and there are three experts.
            unsafe { kernels.experts.scale_pairs(&bench.stream, scaled)? };
            let mut expected = x.clone();
            for item in (0..3).filter(|item| here[2 * item + 1] != 0) {
                let expert = experts[item] as usize;
                for pair in starts[item]..starts[item + 1] {
                    let products = &mut expected[pair as usize * stride..][..rows];
                    products.iter_mut().for_each(|x| *x *= scales[expert]);
                    if is_biased {
                        bench.cpu.kernels.add(products, &bias[expert * stride..][..rows]);
                    }
                }
            }
            row.bits(
                format!("{rows} of {stride}, {is_biased}"),
                &bench.down_f32(&x_up)?,
                &expected,
            );
        }
    }
    Ok(())
}
