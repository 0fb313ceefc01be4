//! Activations as products read them.

use super::bench::Bench;
use super::data::Random;
use super::report::Report;
use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, Quantize, record_bytes, records_of};
use crate::simd::{ActKind, Activations};

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let quantize = Quantize::load(&bench.gpu)?;
    for (name, kind) in [
        ("quantize_f32", ActKind::F32),
        ("quantize_q8_0", ActKind::Q8_0),
        ("quantize_q8_k", ActKind::Q8_K),
    ] {
        report.row(name, format!("{kind:?}").to_lowercase(), |row| {
            for [tokens, blocks] in bench.shapes(&[[1, 1], [3, 5]], &[[512, 16]]) {
                let cols = blocks * kind.block_len().max(32);
                let mut x = Random(cols as u64).floats(tokens * cols);
                // Zeros, too small to scale, ties.
                for (i, x) in x.iter_mut().enumerate() {
                    match i / 32 {
                        1 => *x = 0.0,
                        2 => *x = 1e-40,
                        4 => *x = if i % 32 == 0 { 127.0 } else { (i % 32) as f32 - 15.5 },
                        _ => {}
                    }
                }
                let mut acts = Activations::new();
                acts.resize(kind, tokens, cols);
                acts.quantize_rows(bench.cpu.kernels, 0..tokens, &x, cols);
                // Gaps between arrays are nobody's.
                let out = bench.up(&vec![0; tokens * record_bytes(kind, cols)])?;
                let x = bench.up_f32(&x)?;
                let records = DeviceActs::new(kind, tokens, cols, out.all());
                quantize.store(&bench.stream, x.all(), cols, records)?;
                let shape = format!("{tokens}×{cols}");
                row.words(shape, &bench.down(&out)?, &records_of(acts.all()));
            }
            Ok(())
        });
    }
    Ok(())
}
