//! A matrix a head on the emulated device against `Cpu::head_products`, to the bit, in every type.

use crate::support::Bench;
use common::quant::{Random, bits, types, weights};
use moeba::backend::cpu::Cpu;
use moeba::backend::gpu::acts::{DeviceActs, records_of};
use moeba::backend::gpu::heads::{DeviceHeadMats, Heads};
use moeba::backend::gpu::mat::DeviceMat;
use moeba::backend::ops::HeadMats;
use moeba::gguf::TensorType;
use moeba::simd::{self, Activations, MatRef, act_kind};

/// Heads whose rows stand `step` apart, from `first` on.
#[derive(Clone, Copy)]
struct Shape {
    n_heads: usize,
    rows: usize,
    first: usize,
    step: usize,
    cols: usize,
    tokens: usize,
}

fn compare(ty: TensorType, shape: Shape, seed: u64) {
    let (bench, mut random) = (Bench::new(seed), Random(seed));
    let Shape { n_heads, rows, first, step, cols, tokens } = shape;
    let all_rows = first + n_heads * step.max(rows);
    let bytes = weights(ty, all_rows, cols, 0, &mut random);
    let x = random.floats(tokens * n_heads * cols);
    let mut acts = Activations::new();
    acts.resize(act_kind(ty), tokens * n_heads, cols);
    let kernels = simd::by_name("scalar").unwrap();
    acts.quantize_rows(kernels, 0..tokens * n_heads, &x, cols);
    let mut expected = vec![0.0; tokens * n_heads * rows];
    let all = MatRef::dense(ty, &bytes, all_rows, cols);
    let mats = HeadMats { all, n_heads, rows, first, step };
    Cpu::new(1).head_products(mats, acts.all(), &mut expected);

    let (mat, records) = (bench.up(&bytes), bench.up(&records_of(acts.all())));
    let out = bench.empty(4 * expected.len());
    let all = DeviceMat::dense(ty, mat.all(), all_rows, cols);
    let mats = DeviceHeadMats { all, n_heads, rows, first, step };
    let x = DeviceActs::new(act_kind(ty), tokens * n_heads, cols, records.all());
    Heads::load(&bench.gpu).unwrap().launch(&bench.stream, mats, x, out.all()).unwrap();
    assert_eq!(bits(&bench.down_f32(&out)), bits(&expected), "{ty}, {tokens} tokens");
}

#[test]
fn every_type_has_the_cpus_bits() {
    for (seed, ty) in types().into_iter().enumerate() {
        let cols = 2 * ty.block_len().max(32);
        for tokens in [1, 11] {
            let shape = Shape { n_heads: 3, rows: 5, first: 0, step: 5, cols, tokens };
            compare(ty, shape, seed as u64);
        }
    }
}

/// Keys and values of a head in one matrix: a head's rows are a part of those between two heads.
#[test]
fn heads_take_their_rows_from_a_matrix_of_all() {
    for (seed, ty) in [TensorType::Q8_0, TensorType::Q4_K, TensorType::F32].into_iter().enumerate()
    {
        let values = Shape { n_heads: 4, rows: 33, first: 7, step: 40, cols: 512, tokens: 11 };
        compare(ty, values, seed as u64);
    }
}
