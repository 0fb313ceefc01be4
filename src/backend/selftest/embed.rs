//! Rows of a table of embeddings, in every type.

use super::bench::Bench;
use super::data::{Random, weights};
use super::report::Report;
use crate::Result;
use crate::backend::gpu::embed::Embed;
use crate::backend::gpu::mat::{DeviceMat, all_types, types};
use crate::quant;

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let embed = Embed::load(&bench.gpu, &all_types())?;
    for ty in types() {
        report.row("embed", ty, |row| {
            let block = ty.block_len();
            let (odd, large) = ([3 * block.max(3)], [40 * block.max(32)]);
            for cols in bench.shapes(&[3 * block.max(32)], &odd, &large) {
                let rows = 5;
                let bytes = weights(ty, rows, cols, &mut Random(3));
                let ids = [4u32, 0, 4, 2];
                let (table, id_buffer) = (bench.up(&bytes)?, bench.up_u32(&ids)?);
                let out = bench.empty(4 * ids.len() * cols)?;
                let mat = DeviceMat::dense(ty, table.all(), rows, cols);
                let (stream, n) = (&bench.stream, ids.len());
                // SAFETY: the ids are rows of the table.
                unsafe { embed.launch(stream, mat, id_buffer.all(), n, out.all()) }?;
                let mut all = vec![0.0; rows * cols];
                quant::dequantize(ty, &bytes, &mut all);
                let of = |id: &u32| &all[*id as usize * cols..][..cols];
                let expected: Vec<f32> = ids.iter().flat_map(of).copied().collect();
                row.bits(format!("{n}×{cols}"), &bench.down_f32(&out)?, &expected);
            }
            Ok(())
        });
    }
    Ok(())
}
