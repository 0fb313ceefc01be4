//! Keys of blocks of positions, and their places in the cache.

use super::Bench;
use super::operands::Cached;
use crate::Result;
use crate::backend::cpu::compress::ScoredRow;
use crate::backend::gpu::block_keys::{BlockKeys, KeyRows, KeyScores};
use crate::backend::gpu::cache::CacheStore;
use crate::gguf::TensorType::{F16, F32, Q8_0};

/// Texts of so many positions, computed in parts that end at these.
const PARTS: [&[usize]; 4] = [&[1, 2, 3, 4, 5], &[3, 9], &[19], &[2, 13, 16, 17]];

#[derive(Clone, Copy)]
struct Shape {
    dim: usize,
    block: usize,
    parts: &'static [usize],
}

impl Shape {
    fn tokens(&self) -> usize {
        *self.parts.last().expect("some")
    }

    fn name(&self) -> String {
        format!("blocks of {} of {} elements, parts to {:?}", self.block, self.dim, self.parts)
    }
}

struct Kernels {
    keys: BlockKeys,
    store: CacheStore,
}

pub fn check(bench: &Bench) -> Result<()> {
    let keys = BlockKeys::load(&bench.gpu)?;
    let kernels = Kernels { keys, store: CacheStore::load(&bench.gpu)? };
    let sizes = bench.shapes(&[(32, 4)], &[(192, 4), (5, 7)], &[(128, 16)]);
    let of = |(dim, block)| PARTS.map(|parts| Shape { dim, block, parts });
    let shapes: Vec<Shape> = sizes.into_iter().flat_map(of).collect();
    for (name, scored) in [("pool_keys", true), ("mean_keys", false)] {
        bench.each(name, "f32", &shapes, |shape| compare(bench, &kernels, *shape, scored));
    }
    Ok(())
}

/// The keys of blocks, of keys and scores [tokens, dim] and of places' scores [block, dim].
fn expected(
    bench: &Bench,
    shape: Shape,
    [x, scores, places]: [&[f32]; 3],
    scored: bool,
) -> Vec<f32> {
    let Shape { dim, block, .. } = shape;
    let width = block * dim;
    let (mut all, mut key) = (Vec::new(), vec![0.0; dim]);
    for (x, scores) in x.chunks_exact(width).zip(scores.chunks_exact(width)) {
        if scored {
            let sums: Vec<f32> = scores.iter().zip(places).map(|(a, b)| a + b).collect();
            let rows = x.chunks_exact(dim).zip(sums.chunks_exact(dim));
            let rows = rows.map(|(values, scores)| ScoredRow { values, scores });
            bench.cpu.compress_rows(rows, &mut Vec::new(), &mut key);
        } else {
            key.copy_from_slice(&x[..dim]);
            for row in x.chunks_exact(dim).skip(1) {
                key.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            key.iter_mut().for_each(|x| *x /= block as f32);
        }
        all.extend_from_slice(&key);
    }
    all
}

fn compare(bench: &Bench, kernels: &Kernels, shape: Shape, scored: bool) -> Result<()> {
    let (Shape { dim, block, parts }, tokens) = (shape, shape.tokens());
    let lengths = [tokens * dim, tokens * dim, block * dim];
    let [x, scores, places] = bench.seeded(dim + tokens, lengths)?;
    let expected = expected(bench, shape, [&x, &scores, &places], scored);

    let (past, out) = (bench.word(0)?, bench.empty(4 * tokens * dim)?);
    let state = bench.empty(8 * block * dim)?;
    [&state, &out].into_iter().try_for_each(|buffer| bench.stream.fill(buffer.all(), 0))?;
    let mut first = 0;
    for end in parts {
        let own = 4 * first * dim..4 * end * dim;
        let [x, of_rows] = [&x, &scores].map(|values| values.device.slice(own.clone()));
        let of_part = scored.then(|| KeyScores { of_rows, of_places: places.gpu() });
        let rows = KeyRows { x, dim, block, past: past.gpu(), first };
        kernels.keys.launch(&bench.stream, rows, of_part, state.all(), out.slice(own))?;
        first = *end;
    }
    let all: Vec<f32> = bench.down(&out)?;
    let last_rows = all.chunks_exact(dim).skip(block - 1).step_by(block);
    bench.equal_values(
        shape.name(),
        &last_rows.flatten().copied().collect::<Vec<_>>(),
        &expected,
    )?;
    // A row of the cache for each block, if there are any.
    let n_blocks = tokens / block;
    let types = [F32, F16, Q8_0].into_iter().filter(|_| n_blocks > 0);
    for ty in types.filter(|ty| dim.is_multiple_of(ty.block_len())) {
        let cached = Cached::new(bench, ty, [1, n_blocks, dim], &expected, 0);
        let stored = bench.empty(cached.bytes.len().max(256))?;
        bench.stream.fill(stored.all(), 0)?;
        let (x, rows) = (out.all(), cached.at(&stored));
        kernels.store.store_blocks(&bench.stream, x, tokens, past.gpu(), rows, block)?;
        let got = &bench.down(&stored)?[..cached.bytes.len()];
        bench.equal_values(format!("{}: stored as {ty}", shape.name()), got, &cached.bytes[..])?;
    }
    Ok(())
}
