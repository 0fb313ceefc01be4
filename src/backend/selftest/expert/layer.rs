//! A layer's experts with their tokens, on the CPU and in slots of the device.

use crate::Result;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::cpu::expert::{ExpertBuffers, GranuleMats};
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::acts::records_of;
use crate::backend::gpu::expert::ExpertShape;
use crate::backend::ops::{Activation, Demand, ExpertBiases, ExpertForm, ExpertScales};
use crate::backend::selftest::data::{mix_in_any_bits, weights};
use crate::backend::selftest::{Bench, Mirror, Random};
use crate::gguf::TensorType;
use crate::simd::MatRef;
use std::ops::Range;

pub const N_EXPERTS: usize = 3;

#[derive(Clone, Copy)]
pub struct Spec {
    /// The types of gate, up and down.
    pub types: [TensorType; 3],
    /// Width of the model, of an expert, rows of a granule.
    pub sizes: [usize; 3],
    pub activation: Activation,
    pub is_biased: bool,
    /// Experts have factors on their products of gate and up.
    pub is_scaled: bool,
    /// Half of the blocks have bits that no quantiser writes.
    pub has_any_bits: bool,
}

impl Spec {
    pub fn plain(ty: TensorType) -> Spec {
        Spec {
            types: [ty; 3],
            sizes: [0; 3],
            activation: Activation::Silu,
            is_biased: false,
            is_scaled: false,
            has_any_bits: false,
        }
    }
}

pub struct Layer {
    pub shape: ExpertShape,
    /// Gate, up and down of each expert.
    matrices: Vec<[Vec<u8>; 3]>,
    pub biases: Option<ExpertBiases>,
    pub scales: Option<ExpertScales>,
}

/// Tokens with the experts that their router has chosen.
pub struct Tokens {
    pub n: usize,
    /// [tokens, ranks]
    pub chosen: Vec<u32>,
    /// [tokens, ranks]
    pub weights: Vec<f32>,
    x: ActSet,
}

fn bytes_of(ty: TensorType, rows: usize, cols: usize) -> usize {
    ty.row_bytes((rows * cols) as u64).expect("whole blocks") as usize
}

impl Layer {
    pub fn new(spec: Spec) -> Layer {
        let Spec { types: [gate, up, down], sizes, activation, .. } = spec;
        let [n_embd, n_ff, granule_rows] = sizes;
        let up_at = bytes_of(gate, granule_rows, n_embd).next_multiple_of(16);
        let down_at = (up_at + bytes_of(up, granule_rows, n_embd)).next_multiple_of(16);
        let shape = ExpertShape {
            gate,
            up,
            down,
            n_embd,
            n_ff,
            granule_rows,
            gate_at: 0,
            up_at,
            down_at,
            k: 2,
            pairs_a_row: 2,
            activation,
            limit: 0.8,
            up_limit: 0.6,
        };
        let mut random = Random(17);
        let mut matrix = |ty, rows, cols| {
            let mut bytes = weights(ty, rows, cols, &mut random);
            if spec.has_any_bits {
                mix_in_any_bits(ty, &mut bytes, &mut random);
            }
            bytes
        };
        let expert =
            |_| [matrix(gate, n_ff, n_embd), matrix(up, n_ff, n_embd), matrix(down, n_embd, n_ff)];
        let matrices = (0..N_EXPERTS).map(expert).collect();
        let biases = spec.is_biased.then(|| ExpertBiases {
            gate: if activation.is_gated() { random.floats(N_EXPERTS * n_ff) } else { Vec::new() },
            up: random.floats(N_EXPERTS * n_ff),
            down: random.floats(N_EXPERTS * n_embd),
        });
        let scales = spec.is_scaled.then(|| ExpertScales {
            gate: if activation.is_gated() { random.floats(N_EXPERTS) } else { Vec::new() },
            up: random.floats(N_EXPERTS),
        });
        Layer { shape, matrices, biases, scales }
    }

    pub fn name(&self) -> String {
        let ExpertShape { gate, up, down, n_embd, n_ff, granule_rows, .. } = self.shape;
        format!("{gate}, {up}, {down}: {n_embd}×{n_ff} by {granule_rows}")
    }

    pub fn rows(&self, granule: usize) -> Range<usize> {
        let first = granule * self.shape.granule_rows;
        first..self.shape.n_ff.min(first + self.shape.granule_rows)
    }

    /// The granule's rows of gate and up and columns of down.
    pub fn mats(&self, expert: usize, granule: usize) -> [MatRef<'_>; 3] {
        let s = &self.shape;
        let [gate, up, down] = &self.matrices[expert];
        let rows = self.rows(granule);
        [
            MatRef::dense(s.gate, gate, s.n_ff, s.n_embd).row_range(rows.clone()),
            MatRef::dense(s.up, up, s.n_ff, s.n_embd).row_range(rows.clone()),
            MatRef::dense(s.down, down, s.n_embd, s.n_ff).column_range(rows),
        ]
    }

    fn kinds(&self) -> Kinds {
        let s = &self.shape;
        let gate = if s.activation.is_gated() { s.gate } else { s.up };
        Kinds::of([gate, s.up])
    }

    /// The sum that the CPU adds to zeros: [tokens, n_embd].
    pub fn on_cpu(&self, bench: &Bench, tokens: &Tokens) -> Vec<f32> {
        let s = &self.shape;
        let mut demand = Demand::default();
        demand.group(&tokens.chosen, s.k, N_EXPERTS);
        let mut granules = Vec::new();
        for (slot, expert) in demand.experts.iter().enumerate() {
            for g in 0..s.n_granules() {
                let [gate, up, down] = self.mats(*expert as usize, g);
                let gate = s.activation.is_gated().then_some(gate);
                granules.push(GranuleMats { slot, rows: self.rows(g), gate, up, down });
            }
        }
        let mut buffers = ExpertBuffers::default();
        buffers.begin(demand.n_pairs(), s.n_ff, s.n_embd, Kinds::of([s.down]));
        let form = ExpertForm {
            activation: s.activation,
            limit: s.limit,
            up_limit: s.up_limit,
            biases: self.biases.as_ref(),
            scales: self.scales.as_ref(),
            adapted: None,
        };
        bench.cpu.expert_granules(&granules, &demand, form, &tokens.x, &mut buffers);
        let mut y = vec![0.0; tokens.n * s.n_embd];
        bench.cpu.ordered_sum(&demand, &tokens.weights, &buffers, &mut y);
        assert!(y.iter().any(|y| *y != 0.0), "{}: the data tests nothing", self.name());
        y
    }

    /// A slot for each granule of each expert, in which nothing else is written.
    pub fn upload(&self, bench: &Bench) -> Result<Vec<Vec<DeviceBuffer>>> {
        let s = &self.shape;
        let slot_bytes = s.down_at + bytes_of(s.down, s.n_embd, s.granule_rows);
        let slot = |expert, granule| -> Result<DeviceBuffer> {
            let slot = bench.empty(slot_bytes)?;
            let parts = self.mats(expert, granule).into_iter();
            for (mat, at) in parts.zip([s.gate_at, s.up_at, s.down_at]) {
                let bytes: Vec<u8> = (0..mat.rows).flat_map(|r| mat.row(r).to_vec()).collect();
                bench.stream.upload_now(slot.slice(at..at + bytes.len()), &bytes)?;
            }
            Ok(slot)
        };
        let expert = |e| (0..s.n_granules()).map(|g| slot(e, g)).collect();
        (0..N_EXPERTS).map(expert).collect()
    }
}

impl Tokens {
    pub fn new(bench: &Bench, layer: &Layer, chosen: &[u32]) -> Tokens {
        let (n, n_embd) = (chosen.len() / layer.shape.k, layer.shape.n_embd);
        let mut random = Random(23);
        let mut x = ActSet::default();
        x.fill(&bench.cpu, layer.kinds(), n, n_embd, &random.floats(n * n_embd));
        Tokens { n, chosen: chosen.to_vec(), weights: random.floats(chosen.len()), x }
    }

    /// The tokens' activations as a matrix of this type reads them.
    pub fn records(&self, bench: &Bench, ty: TensorType) -> Result<Mirror<u8>> {
        bench.up(records_of(self.x.view(ty)))
    }
}
