//! Rotary positions.

use super::bench::Bench;
use super::data::Random;
use super::report::Report;
use crate::Result;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::gpu::rope::{DeviceCosSin, Rope};
use crate::backend::ops::{Frequencies, RopePairing, RopeShape};

/// The first token's position.
const FIRST: usize = 11;

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let rope = Rope::load(&bench.gpu)?;
    // (tokens, heads, head_dim, offset, pairs)
    let shapes = bench.shapes(
        &[(1, 4, 64, 0, 32), (5, 3, 80, 16, 32), (7, 2, 10, 1, 3)],
        &[(1, 1, 2, 0, 1)],
        &[(512, 32, 128, 0, 64)],
    );
    for pairing in [RopePairing::Adjacent, RopePairing::Halves] {
        report.row("rope", format!("{pairing:?}").to_lowercase(), |row| {
            for (tokens, heads, head_dim, offset, pairs) in shapes.iter().copied() {
                let frequencies = (0..pairs).map(|i| 0.9f32.powi(i)).collect();
                let frequencies = Frequencies::new(frequencies, 1.25);
                let n_pairs = pairs as usize;
                let shape = RopeShape { head_dim, offset, pairing };
                let mut x = Random(tokens as u64).floats(tokens * heads * head_dim);
                let x_up = bench.up_f32(&x)?;
                let (mut table, mut whole) = (RopeTable::default(), RopeTable::default());
                table.fill(&frequencies, FIRST, tokens);
                whole.fill(&frequencies, 0, FIRST + tokens);
                let mut back = RopeTable::default();
                back.fill_back(&table);
                bench.cpu.rope(&mut x, shape, &table);
                let cos_sin = bench.up_f32(whole.turns().as_flattened())?;
                let rows: Vec<u32> = (FIRST..FIRST + tokens).map(|p| p as u32).collect();
                let rows = bench.up_u32(&rows)?;
                let data = cos_sin.all();
                let name = format!("{tokens}×{heads}×{head_dim}");
                for is_back in [false, true] {
                    let table = DeviceCosSin { data, n_pairs, back: is_back };
                    // SAFETY: the table has each of these positions.
                    unsafe { rope.launch(&bench.stream, x_up.all(), shape, table, rows.all()) }?;
                    row.bits(&name, &bench.down_f32(&x_up)?, &x);
                    bench.cpu.rope(&mut x, shape, &back);
                }
            }
            Ok(())
        });
    }
    Ok(())
}
