//! Prompts: pairs grouped by expert; a launch for gate and one for up, and one for each granule of
//! down.

use super::Kernels;
use super::layer::{Layer, N_EXPERTS, Tokens};
use crate::Result;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::acts::{DeviceActs, record_bytes};
use crate::backend::gpu::expert::{OrderedSum, Scaled};
use crate::backend::gpu::matmul::{GroupBias, Groups, TILE_TOKENS, tile_kind};
use crate::backend::ops::tiles;
use crate::backend::selftest::{Bench, Mirror, try_map};
use crate::gguf::TensorType;
use crate::simd::act_kind;

const N_TOKENS: u32 = 40;

/// A layer with biases.
pub fn compare(bench: &Bench, kernels: &Kernels, layer: &Layer) -> Result<()> {
    let grouped = Grouped::new(bench, kernels, layer, N_TOKENS)?;
    let expected = layer.on_cpu(bench, &grouped.tokens);
    bench.equal_values(layer.name(), &grouped.run()?, &expected)
}

/// Pairs in the order of their experts.
pub struct Grouped<'a> {
    pub bench: &'a Bench,
    pub kernels: &'a Kernels,
    pub layer: &'a Layer,
    pub tokens: Tokens,
    pub n_pairs: usize,
    /// A slot for each granule of each expert.
    _slots: Vec<Vec<DeviceBuffer>>,
    /// The slots' addresses: [experts, granules].
    pub table: Mirror<u64>,
    /// Tiles of both kinds, with one in the middle that has no pairs.
    tiles: [Mirror<u32>; 2],
    /// [pairs] and [tokens, k].
    token_of: Mirror<u32>,
    places: Mirror<u32>,
    /// 0, 1, 2.
    experts: Mirror<u32>,
    /// Biases of gate, up and down.
    biases: [Mirror<f32>; 3],
}

impl<'a> Grouped<'a> {
    /// Expert 1 has all tokens, more than a tile has columns, expert 2 few.
    pub fn new(
        bench: &'a Bench,
        kernels: &'a Kernels,
        layer: &'a Layer,
        n_tokens: u32,
    ) -> Result<Grouped<'a>> {
        let chosen = (0..n_tokens).flat_map(|t| [1, if t % 9 == 0 { 2 } else { 0 }]);
        let chosen: Vec<u32> = chosen.collect();
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by_key(|i| chosen[*i]);
        let mut places = vec![0u32; chosen.len()];
        order.iter().enumerate().for_each(|(pair, i)| places[*i] = pair as u32);
        let token_of: Vec<u32> = order.iter().map(|i| (i / layer.shape.k) as u32).collect();
        let below = |e: u32| chosen.iter().filter(|c| **c < e).count();
        let starts: Vec<usize> = (0..=N_EXPERTS as u32).map(below).collect();
        let tiles = try_map(TILE_TOKENS, |size| {
            let mut words = tiles(&starts, size, |_| true);
            words.splice(4..4, [0; 4]);
            bench.up(words)
        })?;
        let slots = layer.upload(bench)?;
        let addresses = slots.iter().flatten().map(|slot| slot.all().address());
        let biases = layer.biases.as_ref().expect("a layer with biases");
        Ok(Grouped {
            bench,
            kernels,
            layer,
            tokens: Tokens::new(bench, layer, &chosen),
            n_pairs: order.len(),
            table: bench.up(addresses)?,
            _slots: slots,
            tiles,
            token_of: bench.up(token_of)?,
            places: bench.up(places)?,
            experts: bench.up(0..N_EXPERTS as u32)?,
            biases: try_map([&biases.gate, &biases.up, &biases.down], |x| bench.up(x.to_vec()))?,
        })
    }

    /// A matrix whose first granule is `granule`.
    fn groups(&self, ty: TensorType, granule: usize, [rows, cols]: [usize; 2]) -> Groups<'_> {
        Groups {
            ty,
            rows,
            cols,
            granule_rows: rows,
            n_items: N_EXPERTS,
            n_pairs: self.n_pairs,
            matrices: self.table.device.slice(8 * granule..8 * self.table.len()),
            n_granules: self.layer.shape.n_granules(),
            matrix_at: 0,
            tiles: Some(self.tiles[tile_kind(ty)].gpu()),
            tokens: None,
            bias: None,
            accumulate: false,
        }
    }

    /// All granules of gate and of up, with their biases.
    pub fn gate_and_up(&self) -> [Groups<'_>; 2] {
        let s = &self.layer.shape;
        [(s.gate, s.gate_at, 0), (s.up, s.up_at, 1)].map(|(ty, matrix_at, i)| {
            let (experts, values) = (Some(self.experts.gpu()), self.biases[i].gpu());
            Groups {
                matrix_at,
                granule_rows: s.granule_rows,
                tokens: Some(self.token_of.gpu()),
                bias: Some(GroupBias { experts, values, stride: s.n_ff }),
                ..self.groups(ty, 0, [s.n_ff, s.n_embd])
            }
        })
    }

    /// `cols` columns of down from a granule on, with its bias.
    pub fn down_from(&self, granule: usize, cols: usize) -> Groups<'_> {
        let s = &self.layer.shape;
        let values = self.biases[2].gpu();
        Groups {
            matrix_at: s.down_at,
            bias: Some(GroupBias { experts: None, values, stride: s.n_embd }),
            ..self.groups(s.down, granule, [s.n_embd, cols])
        }
    }

    /// Activated rows. The activation has a kernel of its own: it is computed on the CPU here.
    pub fn activated(&self, sums: [&DeviceBuffer; 2]) -> Result<Mirror<f32>> {
        let [gate, up] = try_map(sums, |sums| self.bench.down::<f32>(sums))?;
        let mut inner = vec![0.0; gate.len()];
        self.bench.cpu.kernels.swiglu(&gate, &up, &mut inner);
        self.bench.up(inner)
    }

    /// The tokens' sums of what down gives: f32 [pairs, n_embd].
    pub fn sum(&self, partial: &DeviceBuffer) -> Result<Vec<f32>> {
        let Grouped { bench, kernels, layer, tokens, .. } = self;
        let y = bench.up(vec![0.0; tokens.n * layer.shape.n_embd])?;
        let weights = bench.up(tokens.weights.to_vec())?;
        let sum = OrderedSum {
            n_tokens: tokens.n,
            pairs: self.places.gpu(),
            is_grouped: true,
            weights: weights.gpu(),
            partial: partial.all(),
            y: y.gpu(),
            begins: false,
            residual: None,
        };
        // SAFETY: the places are those of the pairs.
        unsafe { kernels.experts.ordered_sum(&bench.stream, &layer.shape, sum)? };
        bench.down(&y.device)
    }

    /// Down goes granule by granule; the first begins with the bias.
    fn run(&self) -> Result<Vec<f32>> {
        let Grouped { bench, kernels, layer, tokens, n_pairs, .. } = self;
        let (s, n_pairs, stream) = (&layer.shape, *n_pairs, &bench.stream);
        let x = tokens.records(bench, s.up)?;
        let x = DeviceActs::new(act_kind(s.up), tokens.n, s.n_embd, x.gpu());
        let sums = try_map([4 * n_pairs * s.n_ff; 2], |bytes| bench.empty(bytes))?;
        for (groups, out) in self.gate_and_up().into_iter().zip(&sums) {
            // SAFETY: the tables are those of the slots, of pairs and of their tokens.
            unsafe { kernels.products.grouped(stream, groups, x, out.all(), s.n_ff) }?;
        }
        let inner = self.activated(sums.each_ref())?;
        let kind = act_kind(s.down);
        let records = bench.empty(n_pairs * record_bytes(kind, s.n_ff))?;
        let acts = DeviceActs::new(kind, n_pairs, s.n_ff, records.all());
        kernels.quantize.store(stream, inner.gpu(), s.n_ff, acts)?;
        let partial = bench.empty(4 * n_pairs * s.n_embd)?;
        for g in 0..s.n_granules() {
            let (cols, accumulate) = (layer.rows(g), g > 0);
            let groups = self.down_from(g, cols.len());
            let groups = Groups { bias: groups.bias.filter(|_| g == 0), accumulate, ..groups };
            let acts = acts.column_range(cols);
            // SAFETY: the tables are those of the slots and of pairs.
            unsafe { kernels.products.grouped(stream, groups, acts, partial.all(), s.n_embd) }?;
        }
        self.sum(&partial)
    }
}

/// Products of three items, of which one was not multiplied, with factors and with or without
/// biases; columns behind the granule's rows stay as they are.
pub fn scale(bench: &Bench, kernels: &Kernels) -> Result<()> {
    // The second of two granules.
    let (starts, experts) = (bench.up([0u32, 3, 4, 9])?, bench.up([2u32, 0, 1])?);
    let granules = bench.up([0u64, 1, 1, 0, 0, 1])?;
    for (rows, stride) in [(1, 1), (40, 43), (300, 512)] {
        let [x, scales, bias] = bench.seeded(rows, [9 * stride, 3, 3 * stride])?;
        for is_biased in [false, true] {
            let mut x = bench.up(x.to_vec())?;
            let scaled = Scaled {
                x: x.gpu(),
                stride,
                rows,
                n_items: 3,
                n_pairs: 9,
                granules: granules.device.slice(8..48),
                n_granules: 2,
                starts: Some(starts.gpu()),
                experts: Some(experts.gpu()),
                scales: scales.gpu(),
                bias: is_biased.then(|| bias.gpu()),
                bias_stride: stride,
            };
            // SAFETY: the starts ascend to the number of pairs, and there are three experts.
            unsafe { kernels.experts.scale_pairs(&bench.stream, scaled)? };
            for item in (0..3).filter(|item| granules[2 * item + 1] != 0) {
                let expert = experts[item] as usize;
                for pair in starts[item]..starts[item + 1] {
                    let products = &mut x[pair as usize * stride..][..rows];
                    products.iter_mut().for_each(|x| *x *= scales[expert]);
                    if is_biased {
                        bench.cpu.kernels.add(products, &bias[expert * stride..][..rows]);
                    }
                }
            }
            bench.equal(format!("{rows} of {stride}, {is_biased}"), &x)?;
        }
    }
    Ok(())
}
