//! Grouping of pairs by expert.

use super::{Bench, Random, try_map};
use crate::Result;
use crate::backend::gpu::group::{Grouper, Grouping};
use crate::backend::gpu::matmul::{TILE_TOKENS, TILE_WORDS, max_tiles};
use crate::backend::ops::{Demand, NO_EXPERT, tiles};
use bytemuck::cast_slice_mut;

pub fn check(bench: &Bench) -> Result<()> {
    let grouper = Grouper::load(&bench.gpu)?;
    // [tokens, k, experts, granules]
    let small = [[1, 1, 1, 1], [40, 2, 60, 2]];
    let odd = [[9, 6, 300, 3], [33, 1, 5, 1], [530, 4, 7, 2]];
    let shapes = bench.shapes(&small, &odd, &[[512, 8, 128, 1], [4096, 10, 512, 4]]);
    bench.each("group_pairs", "", shapes, |shape| {
        [false, true].into_iter().try_for_each(|skewed| compare(bench, &grouper, shape, skewed))
    });
    Ok(())
}

/// Some ranks have no expert. `is_skewed`: half of the others are one expert's.
fn compare(
    bench: &Bench,
    grouper: &Grouper,
    [n_tokens, k, n_experts, n_granules]: [usize; 4],
    is_skewed: bool,
) -> Result<()> {
    let (mut random, n_pairs) = (Random(n_tokens as u64), n_tokens * k);
    let choose = |_| match random.below(16) {
        0 => NO_EXPERT,
        n if is_skewed && n % 2 == 0 => n_experts as u32 / 2,
        _ => random.below(n_experts) as u32,
    };
    let chosen = bench.up((0..n_pairs).map(choose))?;
    let addresses = (0..n_experts * n_granules).map(|_| random.next());
    let table = bench.up(addresses)?;
    let matrices = bench.empty(8 * table.len())?;
    let [mut starts, tokens, mut places] =
        try_map([n_experts + 1, n_pairs, n_pairs], |n| bench.out::<u32>(n))?;
    let n_tiles = TILE_TOKENS.map(|size| max_tiles(n_pairs, n_experts, size));
    let mut lists = try_map(n_tiles, |n| bench.out::<u32>(TILE_WORDS * n))?;
    for splits_input in [false, true] {
        let grouping = Grouping {
            chosen: chosen.gpu(),
            n_experts,
            pairs_a_row: if splits_input { 1 } else { k },
            table: table.gpu(),
            matrices: matrices.all(),
            starts: starts.gpu(),
            tokens: tokens.gpu(),
            places: places.gpu(),
            tiles: lists.each_ref().map(|list| list.gpu()),
        };
        // SAFETY: the ids are below the number of experts, or none.
        unsafe { grouper.launch(&bench.stream, &grouping)? };
        let twin = Twin::new(&chosen, k, n_experts, splits_input);
        let shape = format!("{n_tokens}×{k} of {n_experts}×{n_granules}, {is_skewed}");
        bench.equal_to(&shape, &matrices, &table)?;
        starts.host = twin.starts.iter().map(|start| *start as u32).collect();
        bench.equal(format!("{shape}: starts"), &starts)?;
        // The kernel writes nothing behind the last pair.
        let n = twin.tokens.len();
        let mut got = vec![0u32; n];
        bench.stream.download_now(cast_slice_mut(&mut got), tokens.device.slice(0..4 * n))?;
        bench.equal_values(format!("{shape}: tokens"), &got, &twin.tokens)?;
        places.host = twin.places;
        bench.equal(format!("{shape}: places"), &places)?;
        for ((list, size), n) in lists.iter_mut().zip(TILE_TOKENS).zip(n_tiles) {
            list.host = tiles(&twin.starts, size, |_| true);
            list.host.resize(TILE_WORDS * n, 0);
            bench.equal(format!("{shape}: tiles of {size}"), list)?;
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
