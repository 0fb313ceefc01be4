//! Activations in the form that products read.

use super::operands::quantized;
use super::{Bench, Mirror, Random, try_map};
use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, Quantize, record_bytes, records_of};
use crate::backend::gpu::norm::Norm;
use crate::simd::ActKind;

pub fn check(bench: &Bench) -> Result<()> {
    let quantize = Quantize::load(&bench.gpu)?;
    for (name, kind) in [
        ("quantize_f32", ActKind::F32),
        ("quantize_q8_0", ActKind::Q8_0),
        ("quantize_q8_k", ActKind::Q8_K),
    ] {
        let shapes = bench.shapes(&[[1, 1], [3, 16]], &[[3, 40]], &[[512, 16]]);
        bench.each(name, format!("{kind:?}").to_lowercase(), shapes, |[tokens, blocks]| {
            let cols = blocks * kind.block_len().max(32);
            let mut x = Random(cols as u64).floats(tokens * cols);
            make_hard(&mut x);
            let x = bench.up(x)?;
            let out = Records::new(bench, kind, tokens, cols)?;
            quantize.store(&bench.stream, x.gpu(), cols, out.gpu())?;
            out.equal(bench, format!("{tokens}×{cols}"), &x)
        });
    }
    const EPS: f32 = 1e-6;
    let norm = Norm::load(&bench.gpu)?;
    let shapes = bench.shapes(&[[3, 256], [2, 768]], &[[9, 2048]], &[[8, 7168]]);
    // Norms that store both kinds of records besides.
    bench.each("rms_norm_acts", "f32", shapes, |[rows, cols]| {
        let [x, weight] = bench.seeded(cols, [rows * cols, cols])?;
        let mut normed = vec![0.0; x.len()];
        bench.cpu.rms_norm_rows(&x, &weight, EPS, &mut normed);
        let kinds = [ActKind::Q8_0, ActKind::Q8_K];
        let records = try_map(kinds, |kind| Records::new(bench, kind, rows, cols))?;
        for given in [[true, true], [true, false], [false, true]] {
            let out = bench.empty(4 * rows * cols)?;
            let acts = [0, 1].map(|i| given[i].then_some(records[i].gpu()));
            norm.rms_norm_acts(&bench.stream, x.gpu(), weight.gpu(), EPS, out.all(), acts)?;
            bench.equal_to(format!("{rows}×{cols}"), &out, &normed)?;
        }
        records.iter().try_for_each(|records| {
            records.equal(bench, format!("{rows}×{cols} as {:?}", records.kind), &normed)
        })
    });
    Ok(())
}

/// Records that a kernel stores. The gaps between their arrays are zeros.
pub struct Records {
    kind: ActKind,
    shape: [usize; 2],
    memory: Mirror<u8>,
}

impl Records {
    pub fn new(bench: &Bench, kind: ActKind, tokens: usize, cols: usize) -> Result<Records> {
        let memory = bench.up(vec![0; tokens * record_bytes(kind, cols)])?;
        Ok(Records { kind, shape: [tokens, cols], memory })
    }

    pub fn gpu(&self) -> DeviceActs<'_> {
        DeviceActs::new(self.kind, self.shape[0], self.shape[1], self.memory.gpu())
    }

    /// Compares them with those that the CPU makes of `x`.
    pub fn equal(&self, bench: &Bench, name: impl ToString, x: &[f32]) -> Result<()> {
        let expected = records_of(quantized(bench, self.kind, x, self.shape[1]).all());
        let [got, expected] = [bench.down(&self.memory.device)?, expected].map(|b| self.words(&b));
        bench.equal_values(name, &got, &expected)
    }

    /// A scale that is NaN may have any bits of a NaN.
    fn words(&self, records: &[u8]) -> Vec<u32> {
        let nan = |word: u32| self.kind != ActKind::F32 && f32::from_bits(word).is_nan();
        let words = records.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        words.map(|word| if nan(word) { u32::MAX } else { word }).collect()
    }
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
