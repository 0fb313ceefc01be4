//! Grouping of pairs by expert.

use super::bench::Bench;
use super::data::Random;
use super::report::{Report, Row};
use crate::Result;
use crate::backend::gpu::group::{Grouper, Grouping};
use crate::backend::gpu::matmul::{TILE_TOKENS, TILE_WORDS, max_tiles};
use crate::backend::ops::{Demand, NO_EXPERT, tiles};

pub fn check(bench: &Bench, report: &mut Report) -> Result<()> {
    let grouper = Grouper::load(&bench.gpu)?;
    report.row("group_pairs", "", |row| {
        // [tokens, k, experts, granules]
        let small = [[1, 1, 1, 1], [40, 2, 60, 2]];
        let odd = [[9, 6, 300, 3], [33, 1, 5, 1], [530, 4, 7, 2]];
        for shape in bench.shapes(&small, &odd, &[[512, 8, 128, 1], [4096, 10, 512, 4]]) {
            for is_skewed in [false, true] {
                compare(bench, &grouper, row, shape, is_skewed)?;
            }
        }
        Ok(())
    });
    Ok(())
}

/// Some ranks have no expert. `is_skewed`: half of the others are one expert's.
fn compare(
    bench: &Bench,
    grouper: &Grouper,
    row: &mut Row,
    [n_tokens, k, n_experts, n_granules]: [usize; 4],
    is_skewed: bool,
) -> Result<()> {
    let (mut random, n_pairs) = (Random(n_tokens as u64), n_tokens * k);
    let chosen: Vec<u32> = (0..n_pairs)
        .map(|_| match random.below(16) {
            0 => NO_EXPERT,
            n if is_skewed && n % 2 == 0 => n_experts as u32 / 2,
            _ => random.below(n_experts) as u32,
        })
        .collect();
    let table: Vec<u64> = (0..n_experts * n_granules).map(|_| random.next()).collect();
    let (chosen_up, table_up) = (bench.up_u32(&chosen)?, bench.up_u64(&table)?);
    let matrices = bench.empty(8 * table.len())?;
    let [starts, tokens, places] = [n_experts + 1, n_pairs, n_pairs].map(|n| bench.empty(4 * n));
    let (starts, tokens, places) = (starts?, tokens?, places?);
    let n_tiles = TILE_TOKENS.map(|size| max_tiles(n_pairs, n_experts, size));
    let [wide, narrow] = n_tiles.map(|n| bench.empty(4 * TILE_WORDS * n));
    let lists = [wide?, narrow?];
    for splits_input in [false, true] {
        let grouping = Grouping {
            chosen: chosen_up.all(),
            n_experts,
            pairs_a_row: if splits_input { 1 } else { k },
            table: table_up.all(),
            matrices: matrices.all(),
            starts: starts.all(),
            tokens: tokens.all(),
            places: places.all(),
            tiles: lists.each_ref().map(|list| list.all()),
        };
        // SAFETY: the ids are below the number of experts, or none.
        unsafe { grouper.launch(&bench.stream, &grouping)? };
        let twin = Twin::new(&chosen, k, n_experts, splits_input);
        let shape = format!("{n_tokens}×{k} of {n_experts}×{n_granules}, {is_skewed}");
        row.words(&shape, &bench.down_u64(&matrices)?, &table);
        let ends: Vec<u32> = twin.starts.iter().map(|start| *start as u32).collect();
        row.words(format!("{shape}: starts"), &bench.down_u32(&starts)?, &ends);
        // What is behind the last pair was never written.
        let n = twin.tokens.len();
        let mut got = vec![0; 4 * n];
        bench.stream.download_now(&mut got, tokens.slice(0..4 * n))?;
        let got: Vec<u32> = got.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        row.words(format!("{shape}: tokens"), &got, &twin.tokens);
        row.words(format!("{shape}: places"), &bench.down_u32(&places)?, &twin.places);
        for ((list, size), n) in lists.iter().zip(TILE_TOKENS).zip(n_tiles) {
            let mut expected = tiles(&twin.starts, size, |_| true);
            expected.resize(TILE_WORDS * n, 0);
            row.words(format!("{shape}: tiles of {size}"), &bench.down_u32(list)?, &expected);
        }
    }
    Ok(())
}

/// The demand's pairs with its experts in the order of their numbers.
struct Twin {
    starts: Vec<usize>,
    tokens: Vec<u32>,
    places: Vec<u32>,
}

impl Twin {
    fn new(chosen: &[u32], k: usize, n_experts: usize, splits_input: bool) -> Twin {
        let mut demand = Demand::default();
        demand.group(chosen, k, n_experts);
        if splits_input {
            demand.split_inputs();
        }
        let (mut starts, mut tokens) = (vec![0], Vec::new());
        let mut place_of = vec![NO_EXPERT; demand.n_pairs()];
        for expert in 0..n_experts as u32 {
            if demand.experts.contains(&expert) {
                for pair in demand.pairs(demand.slot(expert)) {
                    place_of[pair] = tokens.len() as u32;
                    tokens.push(demand.inputs()[pair]);
                }
            }
            starts.push(tokens.len());
        }
        let place = |pair: &u32| place_of.get(*pair as usize).copied().unwrap_or(NO_EXPERT);
        let places = demand.places().iter().map(place).collect();
        Twin { starts, tokens, places }
    }
}
