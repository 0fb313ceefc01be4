//! Activations in the form that products read.

use super::bench::Bench;
use super::data::Random;
use super::report::Report;
use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, Quantize, record_bytes, records_of};
use crate::backend::gpu::norm::Norm;
use crate::simd::{ActKind, Activations};

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let quantize = Quantize::load(&bench.gpu)?;
    for (name, kind) in [
        ("quantize_f32", ActKind::F32),
        ("quantize_q8_0", ActKind::Q8_0),
        ("quantize_q8_k", ActKind::Q8_K),
    ] {
        report.row(name, format!("{kind:?}").to_lowercase(), |row| {
            for [tokens, blocks] in bench.shapes(&[[1, 1], [3, 16]], &[[3, 40]], &[[512, 16]]) {
                let cols = blocks * kind.block_len().max(32);
                let mut x = Random(cols as u64).floats(tokens * cols);
                make_hard(&mut x);
                let mut acts = Activations::new();
                acts.resize(kind, tokens, cols);
                acts.quantize_rows(bench.cpu.kernels, 0..tokens, &x, cols);
                // Gaps between arrays are not compared.
                let out = bench.up(&vec![0; tokens * record_bytes(kind, cols)])?;
                let x = bench.up_f32(&x)?;
                let records = DeviceActs::new(kind, tokens, cols, out.all());
                quantize.store(&bench.stream, x.all(), cols, records)?;
                let shape = format!("{tokens}×{cols}");
                let expected = words(kind, &records_of(acts.all()));
                row.words(shape, &words(kind, &bench.down(&out)?), &expected);
            }
            Ok(())
        });
    }
    normed(bench, report)
}

/// Norms that store both kinds of records besides.
fn normed(bench: &Bench, report: &mut Report) -> Result<()> {
    const EPS: f32 = 1e-6;
    let norm = Norm::load(&bench.gpu)?;
    report.row("rms_norm_acts", "f32", |row| {
        for [rows, cols] in bench.shapes(&[[3, 256], [2, 768]], &[[9, 2048]], &[[8, 7168]]) {
            let mut random = Random(cols as u64);
            let (x, weight) = (random.floats(rows * cols), random.floats(cols));
            let mut expected = vec![0.0; x.len()];
            bench.cpu.rms_norm_rows(&x, &weight, EPS, &mut expected);
            let (x, weight) = (bench.up_f32(&x)?, bench.up_f32(&weight)?);
            let kinds = [ActKind::Q8_0, ActKind::Q8_K];
            let memory = kinds.map(|kind| bench.up(&vec![0; rows * record_bytes(kind, cols)]));
            let [q8_0, q8_k] = memory;
            let memory = [q8_0?, q8_k?];
            let records = [0, 1].map(|i| DeviceActs::new(kinds[i], rows, cols, memory[i].all()));
            for given in [[true, true], [true, false], [false, true]] {
                let out = bench.empty(4 * rows * cols)?;
                let records = [0, 1].map(|i| given[i].then_some(records[i]));
                let (x, weight) = (x.all(), weight.all());
                norm.rms_norm_acts(&bench.stream, x, weight, EPS, out.all(), records)?;
                row.bits(format!("{rows}×{cols}"), &bench.down_f32(&out)?, &expected);
            }
            for (kind, memory) in kinds.into_iter().zip(&memory) {
                let mut acts = Activations::new();
                acts.resize(kind, rows, cols);
                acts.quantize_rows(bench.cpu.kernels, 0..rows, &expected, cols);
                let expected = words(kind, &records_of(acts.all()));
                let shape = format!("{rows}×{cols} as {kind:?}");
                row.words(shape, &words(kind, &bench.down(memory)?), &expected);
            }
        }
        Ok(())
    });
    Ok(())
}

/// Zeros, too small to scale, large, ties at each odd half, NaN, infinity.
fn make_hard(x: &mut [f32]) {
    for (i, x) in x.iter_mut().enumerate() {
        match i / 32 {
            1 => *x = 0.0,
            2 => *x = 1e-40,
            3 => *x *= 1e20,
            4 => *x = if i % 32 == 0 { 127.0 } else { (i % 32) as f32 - 15.5 },
            9 | 50 if i % 32 == 7 => *x = f32::NAN,
            17 | 60 if i % 32 == 9 => *x = f32::NEG_INFINITY,
            _ => {}
        }
    }
}

/// Records word by word. A scale that is NaN may have any bits of a NaN.
pub fn words(kind: ActKind, records: &[u8]) -> Vec<u32> {
    let words = records.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    let nan = |word: u32| kind != ActKind::F32 && f32::from_bits(word).is_nan();
    words.map(|word| if nan(word) { u32::MAX } else { word }).collect()
}
