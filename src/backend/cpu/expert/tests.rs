//! Experts against plain f64 arithmetic, and the promise that neither waves nor threads change a
//! bit.

use super::*;
use crate::backend::ops::NO_EXPERT;
use crate::gguf::TensorType;
use crate::quant;
use proptest::prelude::*;
use std::sync::LazyLock;

#[test]
fn a_demand_groups_pairs_by_expert() {
    let mut d = Demand::default();
    d.group(&[5, 2, 2, 7, 5, 2], 2, 8);
    assert_eq!(d.experts, [5, 2, 7]);
    assert_eq!(d.pairs(d.slot(5)), 0..2);
    assert_eq!(d.pairs(d.slot(2)), 2..5);
    assert_eq!(d.pairs(d.slot(7)), 5..6);
    assert_eq!(d.inputs(), [0, 2, 0, 1, 2, 1]);
    for (i, e) in [5, 2, 2, 7, 5, 2].into_iter().enumerate() {
        let pair = d.places()[i] as usize;
        assert!(d.pairs(d.slot(e)).contains(&pair));
        assert_eq!(d.inputs()[pair] as usize, i / 2);
    }
    d.group(&[NO_EXPERT, 6, NO_EXPERT, 6], 1, 8);
    assert_eq!((d.experts.as_slice(), d.n_pairs(), d.pairs(0)), (&[6][..], 2, 0..2));
    assert_eq!((d.inputs(), d.places()), (&[1, 3][..], &[NO_PAIR, 0, NO_PAIR, 1][..]));
    d.everyone(3);
    assert_eq!((d.experts.as_slice(), d.slot(0), d.pairs(0)), (&[0][..], 0, 0..3));
}

const N_EMBD: usize = 256;
const N_FF: usize = 1024;
const N_EXPERTS: usize = 4;

/// Values in ±`scale` from a fixed sequence.
fn values(n: usize, seed: u32, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..n).map(|_| next()).collect()
}

/// Gate, up and down of a few experts.
struct Layer {
    ty: TensorType,
    matrices: Vec<[Vec<u8>; 3]>,
}

impl Layer {
    fn new(ty: TensorType) -> Layer {
        let matrix = |seed| {
            let x = values(N_EMBD * N_FF, seed, 0.1);
            let mut bytes = vec![0; ty.row_bytes(x.len() as u64).unwrap() as usize];
            quant::quantize(ty, &x, &mut bytes);
            bytes
        };
        let expert = |e| [matrix(3 * e), matrix(3 * e + 1), matrix(3 * e + 2)];
        Layer { ty, matrices: (0..N_EXPERTS as u32).map(expert).collect() }
    }

    fn granule(&self, expert: u32, rows: Range<usize>, demand: &Demand) -> GranuleMats<'_> {
        let [gate, up, down] = &self.matrices[expert as usize];
        GranuleMats {
            slot: demand.slot(expert),
            gate: Some(MatRef::dense(self.ty, gate, N_FF, N_EMBD).row_range(rows.clone())),
            up: MatRef::dense(self.ty, up, N_FF, N_EMBD).row_range(rows.clone()),
            down: MatRef::dense(self.ty, down, N_EMBD, N_FF).column_range(rows.clone()),
            rows,
        }
    }
}

/// One layer a type, made once: quantising is slow beside computing.
fn layer(ty: TensorType) -> &'static Layer {
    static LAYERS: LazyLock<[Layer; 3]> =
        LazyLock::new(|| [TensorType::F32, TensorType::Q8_0, TensorType::Q4_K].map(Layer::new));
    LAYERS.iter().find(|l| l.ty == ty).expect("one of the three")
}

/// `waves`: which expert's next granule comes, wave by wave.
fn compute(
    layer: &Layer,
    n_threads: usize,
    chosen: &[u32],
    weights: &[f32],
    x: &[f32],
    waves: &[Vec<u32>],
) -> Vec<f32> {
    let cpu = Cpu::new(n_threads);
    let n = x.len() / N_EMBD;
    let mut demand = Demand::default();
    demand.group(chosen, chosen.len() / n, N_EXPERTS);
    let kinds = Kinds::of([layer.ty]);
    let mut acts = ActSet::default();
    acts.fill(&cpu, kinds, n, N_EMBD, x);
    let mut buffers = ExpertBuffers::default();
    buffers.begin(demand.n_pairs(), N_FF, N_EMBD, kinds);
    let mut done = [0; N_EXPERTS];
    for wave in waves {
        let mut granules = Vec::new();
        for &e in wave {
            let rows = done[e as usize]..done[e as usize] + 256;
            done[e as usize] = rows.end;
            granules.push(layer.granule(e, rows, &demand));
        }
        let form = ExpertForm {
            activation: Activation::Silu,
            limit: 0.0,
            up_limit: 0.0,
            biases: None,
            scales: None,
            adapted: None,
        };
        cpu.expert_granules(&granules, &demand, form, &acts, &mut buffers);
    }
    assert!(demand.experts.iter().all(|e| done[*e as usize] == N_FF));
    let mut y = vec![0.0; x.len()];
    cpu.ordered_sum(&demand, weights, &buffers, &mut y);
    y
}

const CHOSEN: [u32; 6] = [3, 1, 1, 0, 3, 2];
const WEIGHTS: [f32; 6] = [0.7, 0.3, 0.6, 0.4, 0.5, 0.5];

fn all_at_once() -> Vec<Vec<u32>> {
    vec![(0..4).flat_map(|e| [e; 4]).collect()]
}

#[test]
fn experts_equal_plain_arithmetic() {
    let layer = layer(TensorType::F32);
    let x = values(3 * N_EMBD, 99, 1.0);
    let y = compute(layer, 2, &CHOSEN, &WEIGHTS, &x, &all_at_once());
    let floats = |bytes: &[u8]| -> Vec<f64> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()) as f64).collect()
    };
    for t in 0..3 {
        let x: Vec<f64> = x[t * N_EMBD..][..N_EMBD].iter().map(|v| *v as f64).collect();
        let mut sum = vec![0.0; N_EMBD];
        for rank in 2 * t..2 * t + 2 {
            let [gate, up, down] = &layer.matrices[CHOSEN[rank] as usize];
            let dot = |m: &[f64], r: usize, x: &[f64]| -> f64 {
                m[r * x.len()..][..x.len()].iter().zip(x).map(|(a, b)| a * b).sum()
            };
            let (gate, up, down) = (floats(gate), floats(up), floats(down));
            let inner: Vec<f64> = (0..N_FF)
                .map(|r| {
                    let g = dot(&gate, r, &x);
                    g / (1.0 + (-g).exp()) * dot(&up, r, &x)
                })
                .collect();
            for (r, s) in sum.iter_mut().enumerate() {
                *s += WEIGHTS[rank] as f64 * dot(&down, r, &inner);
            }
        }
        for (a, b) in y[t * N_EMBD..][..N_EMBD].iter().zip(&sum) {
            assert!((*a as f64 - b).abs() < 1e-4 * (1.0 + b.abs()), "{a} for {b}");
        }
    }
}

#[test]
fn experts_without_a_gate_rectify_and_add_biases() {
    let (cpu, layer) = (Cpu::new(2), layer(TensorType::F32));
    let x = values(2 * N_EMBD, 5, 1.0);
    let biases = ExpertBiases {
        gate: Vec::new(),
        up: values(N_EXPERTS * N_FF, 6, 0.5),
        down: values(N_EXPERTS * N_EMBD, 7, 0.5),
    };
    let chosen = [2, 1];
    let mut demand = Demand::default();
    demand.group(&chosen, 1, N_EXPERTS);
    let kinds = Kinds::of([TensorType::F32]);
    let mut acts = ActSet::default();
    acts.fill(&cpu, kinds, 2, N_EMBD, &x);
    let mut buffers = ExpertBuffers::default();
    buffers.begin(demand.n_pairs(), N_FF, N_EMBD, kinds);
    let granule = |e, rows| GranuleMats { gate: None, ..layer.granule(e, rows, &demand) };
    let granules: Vec<_> =
        chosen.iter().flat_map(|e| [granule(*e, 0..512), granule(*e, 512..N_FF)]).collect();
    let form = ExpertForm {
        activation: Activation::Relu,
        limit: 0.0,
        up_limit: 0.0,
        biases: Some(&biases),
        scales: None,
        adapted: None,
    };
    cpu.expert_granules(&granules, &demand, form, &acts, &mut buffers);
    let mut y = vec![0.0; x.len()];
    cpu.ordered_sum(&demand, &[0.5, 2.0], &buffers, &mut y);

    for (t, (expert, weight)) in [(2, 0.5), (1, 2.0)].into_iter().enumerate() {
        let dot = |m: &[u8], x: &[f64]| -> f64 {
            let values = m.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            values.zip(x).map(|(m, x)| f64::from(m) * x).sum()
        };
        let x: Vec<f64> = x[t * N_EMBD..][..N_EMBD].iter().map(|v| f64::from(*v)).collect();
        let [_, up, down] = &layer.matrices[expert];
        let inner = |r: usize| {
            let sum = dot(&up[r * N_EMBD * 4..], &x) + f64::from(biases.up[expert * N_FF + r]);
            sum.max(0.0)
        };
        let inner: Vec<f64> = (0..N_FF).map(inner).collect();
        for r in 0..N_EMBD {
            let bias = f64::from(biases.down[expert * N_EMBD + r]);
            let expected = weight * (dot(&down[r * N_FF * 4..], &inner) + bias);
            let got = f64::from(y[t * N_EMBD + r]);
            assert!((got - expected).abs() < 1e-4 * (1.0 + expected.abs()), "{got}, {expected}");
        }
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// However granules land, on however many threads.
    #[test]
    fn waves_and_threads_change_no_bit(
        order in Just(all_at_once().concat()).prop_shuffle(),
        cuts in prop::collection::btree_set(1usize..16, 0..6),
        n_threads in 1usize..4,
        ty in prop::sample::select(vec![TensorType::F32, TensorType::Q8_0, TensorType::Q4_K]),
    ) {
        let layer = layer(ty);
        let x = values(3 * N_EMBD, 7, 1.0);
        let expected = compute(layer, 1, &CHOSEN, &WEIGHTS, &x, &all_at_once());
        let mut waves = Vec::new();
        let mut start = 0;
        for end in cuts.into_iter().chain([16]) {
            let mut wave = order[start..end].to_vec();
            wave.sort(); // granules of one expert next to each other
            waves.push(wave);
            start = end;
        }
        let got = compute(layer, n_threads, &CHOSEN, &WEIGHTS, &x, &waves);
        let bits = |v: &[f32]| v.iter().map(|f| f.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&expected), bits(&got));
    }
}
