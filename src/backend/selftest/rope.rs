//! Rotary positions.

use super::Bench;
use crate::Result;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::gpu::rope::{DeviceCosSin, Rope};
use crate::backend::ops::{Frequencies, RopePairing, RopeShape};

/// The first token's position.
const FIRST: usize = 11;

pub fn check(bench: &Bench) -> Result<()> {
    let rope = Rope::load(&bench.gpu)?;
    // (tokens, heads, head_dim, offset, pairs)
    let shapes = bench.shapes(
        &[(1, 4, 64, 0, 32), (5, 3, 80, 16, 32), (7, 2, 10, 1, 3)],
        &[(1, 1, 2, 0, 1)],
        &[(512, 32, 128, 0, 64)],
    );
    for pairing in [RopePairing::Adjacent, RopePairing::Halves] {
        let format = format!("{pairing:?}").to_lowercase();
        bench.each("rope", format, &shapes, |&(tokens, heads, head_dim, offset, n_pairs)| {
            let frequencies = (0..n_pairs).map(|i| 0.9f32.powi(i as i32)).collect();
            let frequencies = Frequencies::new(frequencies, 1.25);
            let shape = RopeShape { head_dim, offset, pairing };
            let [mut table, mut whole, mut back] = [(); 3].map(|()| RopeTable::default());
            table.fill(&frequencies, FIRST, tokens);
            whole.fill(&frequencies, 0, FIRST + tokens);
            back.fill_back(&table);
            let [mut x] = bench.seeded(tokens, [tokens * heads * head_dim])?;
            let whole = bench.up(whole.turns().as_flattened().to_vec())?;
            let rows = bench.up((FIRST..FIRST + tokens).map(|p| p as u32))?;
            for (is_back, twin) in [(false, &table), (true, &back)] {
                let table = DeviceCosSin { data: whole.gpu(), n_pairs, back: is_back };
                // SAFETY: the table has each of these positions.
                unsafe { rope.launch(&bench.stream, x.gpu(), shape, table, rows.gpu()) }?;
                bench.cpu.rope(&mut x, shape, twin);
                bench.equal(format!("{tokens}×{heads}×{head_dim}"), &x)?;
            }
            Ok(())
        });
    }
    Ok(())
}
