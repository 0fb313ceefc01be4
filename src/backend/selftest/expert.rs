//! Granules of experts, in every type: gate and up, down, and the ordered sum over ranks.

use super::bench::Bench;
use super::data::{Random, weights};
use super::report::{Report, Row};
use crate::Result;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::expert::{ExpertBuffers, GranuleMats};
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::acts::{DeviceActs, Quantize, record_bytes, records_of};
use crate::backend::gpu::expert::{Chosen, ExpertShape, Experts, OrderedSum};
use crate::backend::gpu::mat::types;
use crate::backend::ops::{Activation, Demand, ExpertForm};
use crate::gguf::TensorType;
use crate::simd::{MatRef, act_kind};
use std::ops::Range;

const N_EXPERTS: usize = 3;
/// Experts of each token, two ranks: [tokens, 2].
const CHOSEN: [u32; 4] = [2, 0, 1, 2];

struct Kernels {
    experts: Experts,
    quantize: Quantize,
}

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let experts = Experts::load(&bench.gpu)?;
    let kernels = Kernels { experts, quantize: Quantize::load(&bench.gpu)? };
    for ty in types() {
        report.row("expert", ty, |row| {
            // Blocks: width of the model, of the expert, of a granule, the last of which is shorter
            // where it can be. Then the sizes of a model.
            let block = ty.block_len().max(32);
            let small = [[block, 3 * block, 2 * block]];
            for sizes in bench.shapes(&small, &[[2048, 768, 256]]) {
                Layer::new(ty, sizes).compare(bench, &kernels, row)?;
            }
            Ok(())
        });
    }
    Ok(())
}

/// A layer's experts, and its tokens.
struct Layer {
    shape: ExpertShape,
    /// Gate, up and down of each expert.
    matrices: Vec<[Vec<u8>; 3]>,
    /// [tokens, n_embd]
    x: Vec<f32>,
    /// [tokens, ranks]
    weights: Vec<f32>,
}

impl Layer {
    fn new(ty: TensorType, [n_embd, n_ff, granule_rows]: [usize; 3]) -> Layer {
        let bytes = |rows, cols: usize| rows * ty.row_bytes(cols as u64).expect("blocks") as usize;
        let up_at = bytes(granule_rows, n_embd).next_multiple_of(16);
        let down_at = (up_at + bytes(granule_rows, n_embd)).next_multiple_of(16);
        let shape = ExpertShape {
            gate: ty,
            up: ty,
            down: ty,
            n_embd,
            n_ff,
            granule_rows,
            gate_at: 0,
            up_at,
            down_at,
            k: 2,
            activation: Activation::Silu,
        };
        let mut random = Random(17);
        let mut matrix = |rows, cols| weights(ty, rows, cols, &mut random);
        let expert = |_| [matrix(n_ff, n_embd), matrix(n_ff, n_embd), matrix(n_embd, n_ff)];
        let matrices = (0..N_EXPERTS).map(expert).collect();
        let x = random.floats(CHOSEN.len() / 2 * n_embd);
        Layer { shape, matrices, x, weights: random.floats(CHOSEN.len()) }
    }

    fn rows(&self, granule: usize) -> Range<usize> {
        let first = granule * self.shape.granule_rows;
        first..self.shape.n_ff.min(first + self.shape.granule_rows)
    }

    /// The granule's rows of gate and up and columns of down.
    fn mats(&self, expert: usize, granule: usize) -> [MatRef<'_>; 3] {
        let ExpertShape { up: ty, n_embd, n_ff, .. } = self.shape;
        let [gate, up, down] = &self.matrices[expert];
        let rows = self.rows(granule);
        [
            MatRef::dense(ty, gate, n_ff, n_embd).row_range(rows.clone()),
            MatRef::dense(ty, up, n_ff, n_embd).row_range(rows.clone()),
            MatRef::dense(ty, down, n_embd, n_ff).column_range(rows),
        ]
    }

    fn n_tokens(&self) -> usize {
        CHOSEN.len() / self.shape.k
    }

    fn compare(&self, bench: &Bench, kernels: &Kernels, row: &mut Row) -> Result<()> {
        let ExpertShape { up: ty, n_embd, n_ff, granule_rows, .. } = self.shape;
        let mut acts = ActSet::default();
        acts.fill(&bench.cpu, Kinds::of([ty]), self.n_tokens(), n_embd, &self.x);
        let expected = self.on_cpu(bench, &acts);
        let records = bench.up(&records_of(acts.view(ty)))?;
        let got = self.on_device(bench, kernels, &records)?;
        row.bits(format!("{n_embd}×{n_ff} by {granule_rows}"), &got, &expected);
        Ok(())
    }

    fn on_cpu(&self, bench: &Bench, acts: &ActSet) -> Vec<f32> {
        let s = &self.shape;
        let mut demand = Demand::default();
        demand.group(&CHOSEN, s.k, N_EXPERTS);
        let mut granules = Vec::new();
        for (slot, expert) in demand.experts.iter().enumerate() {
            for g in 0..s.n_granules() {
                let [gate, up, down] = self.mats(*expert as usize, g);
                let (gate, rows) = (Some(gate), self.rows(g));
                granules.push(GranuleMats { slot, rows, gate, up, down });
            }
        }
        let mut buffers = ExpertBuffers::default();
        buffers.begin(demand.n_pairs(), s.n_ff, s.n_embd, Kinds::of([s.down]));
        let form = ExpertForm { activation: s.activation, biases: None };
        bench.cpu.expert_granules(&granules, &demand, form, acts, &mut buffers);
        let mut y = vec![0.0; self.n_tokens() * s.n_embd];
        bench.cpu.ordered_sum(&demand, &self.weights, &buffers, &mut y);
        y
    }

    /// A slot for each granule of each expert.
    fn upload(&self, bench: &Bench) -> Result<Vec<DeviceBuffer>> {
        let s = &self.shape;
        let mut slots = Vec::new();
        for (expert, granule) in
            (0..N_EXPERTS).flat_map(|e| (0..s.n_granules()).map(move |g| (e, g)))
        {
            let mats = self.mats(expert, granule);
            let parts = mats.map(|m| (0..m.rows).flat_map(|r| m.row(r).to_vec()).collect());
            let [gate, up, down]: [Vec<u8>; 3] = parts;
            let mut bytes = gate;
            bytes.resize(s.up_at, 0);
            bytes.extend(up);
            bytes.resize(s.down_at, 0);
            bytes.extend(down);
            slots.push(bench.up(&bytes)?);
        }
        Ok(slots)
    }

    fn on_device(
        &self,
        bench: &Bench,
        kernels: &Kernels,
        records: &DeviceBuffer,
    ) -> Result<Vec<f32>> {
        let (s, stream, n_pairs) = (&self.shape, &bench.stream, CHOSEN.len());
        let slots = self.upload(bench)?;
        let n = s.n_granules();
        let of = |e: &u32| &slots[*e as usize * n..][..n];
        let table: Vec<u64> = CHOSEN.iter().flat_map(of).map(|slot| slot.all().address()).collect();
        let (table, ids) = (bench.up_u64(&table)?, bench.up_u32(&CHOSEN)?);
        let (weights, y) =
            (bench.up_f32(&self.weights)?, bench.up_f32(&vec![0.0; self.n_tokens() * s.n_embd])?);
        let (inner, partial) =
            (bench.empty(4 * n_pairs * s.n_ff)?, bench.empty(4 * n_pairs * s.n_embd)?);
        let kind = act_kind(s.down);
        let inner_records = bench.empty(n_pairs * record_bytes(kind, s.n_ff))?;
        let acts = DeviceActs::new(kind, n_pairs, s.n_ff, inner_records.all());
        let chosen = Chosen { n_pairs, granules: table.all(), experts: ids.all() };
        let x = |ty| DeviceActs::new(act_kind(ty), self.n_tokens(), s.n_embd, records.all());
        let experts = &kernels.experts;
        let sum = OrderedSum {
            n_tokens: self.n_tokens(),
            pairs: ids.all(),
            is_grouped: false,
            weights: weights.all(),
            partial: partial.all(),
            y: y.all(),
        };
        // SAFETY: the table has addresses of slots of this shape, which live until the results are
        // there; the ids are experts; pairs are those of the tokens and ranks.
        unsafe {
            experts.gate_up(stream, s, chosen, None, x, inner.all())?;
            kernels.quantize.store(stream, inner.all(), s.n_ff, acts)?;
            experts.down(stream, s, chosen, None, acts, partial.all())?;
            experts.ordered_sum(stream, s, sum)?;
        }
        bench.down_f32(&y)
    }
}
