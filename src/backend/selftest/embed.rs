//! Rows of a table of embeddings, in every type.

use super::data::weights;
use super::operands::Mat;
use super::{Bench, Random};
use crate::Result;
use crate::backend::gpu::embed::Embed;
use crate::backend::gpu::mat::{all_types, types};
use crate::quant;

pub fn check(bench: &Bench) -> Result<()> {
    const ROWS: usize = 5;
    let embed = Embed::load(&bench.gpu, &all_types())?;
    for ty in types() {
        let block = ty.block_len();
        let (odd, large) = ([3 * block.max(3)], [40 * block.max(32)]);
        bench.each("embed", ty, bench.shapes(&[3 * block.max(32)], &odd, &large), |cols| {
            let bytes = weights(ty, ROWS, cols, &mut Random(3));
            let (table, ids) =
                (Mat::new(bench, ty, [ROWS, cols], &bytes)?, bench.up([4u32, 0, 4, 2])?);
            let (n, mut out) = (ids.len(), bench.out(ids.len() * cols)?);
            // SAFETY: the ids are rows of the table.
            unsafe { embed.launch(&bench.stream, table.gpu(), ids.gpu(), n, out.gpu()) }?;
            let mut all = vec![0.0; ROWS * cols];
            quant::dequantize(ty, &bytes, &mut all);
            for (to, id) in out.chunks_exact_mut(cols).zip(ids.iter()) {
                to.copy_from_slice(&all[*id as usize * cols..][..cols]);
            }
            bench.equal(format!("{n}×{cols}"), &out)
        });
    }
    Ok(())
}
