//! An indexer's scores, what it chooses, and attention over the rows that are chosen.

use super::operands::{CACHE_TYPES, Cached};
use super::{Bench, Random};
use crate::Result;
use crate::backend::cpu::attention::AttentionShape;
use crate::backend::cpu::attention::index::best;
use crate::backend::gpu::attention::{Attention, AttentionData, DeviceAttention};
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::index::{DeviceIndex, DeviceLists, Index, IndexQueries, Scores};
use crate::backend::ops::RowBytes;
use crate::gguf::TensorType;

#[derive(Clone, Copy, Debug)]
struct Shape {
    scores: Scores,
    n_heads: usize,
    dim: usize,
    block: usize,
    top_k: usize,
    n_near: usize,
    past: usize,
    tokens: usize,
}

impl Shape {
    fn n_ctx(&self) -> usize {
        self.past + self.tokens
    }

    /// Scores of a list of a text of `n` positions.
    fn n_scores(&self, n: usize) -> usize {
        if self.scores == Scores::Sums { n / self.block } else { n.div_ceil(self.block) }
    }
}

/// Positions, some of which see all; keys of blocks; blocks of positions of each head.
fn small() -> Vec<Shape> {
    let of_positions = Shape {
        scores: Scores::Sums,
        n_heads: 16,
        dim: 64,
        block: 1,
        top_k: 6,
        n_near: 0,
        past: 3,
        tokens: 11,
    };
    let of_heads =
        Shape { scores: Scores::Largest, n_heads: 2, block: 4, top_k: 3, ..of_positions };
    vec![
        of_positions,
        Shape { n_heads: 3, block: 4, top_k: 2, past: 30, tokens: 3, ..of_positions },
        Shape { n_near: 1, past: 20, tokens: 5, ..of_heads },
    ]
}

/// More keys than a tile, more tokens than a block takes, many threads, heads that fill no eight.
fn odd() -> Vec<Shape> {
    let [positions, blocks, of_heads] = small().try_into().expect("three");
    vec![
        Shape { n_heads: 9, top_k: 100, past: 700, tokens: 9, ..positions },
        Shape { dim: 192, past: 99, tokens: 1, ..positions },
        Shape { dim: 288, n_heads: 9, past: 70, tokens: 3, ..positions },
        Shape { dim: 416, n_heads: 9, past: 70, ..of_heads },
        Shape { dim: 96, past: 200, tokens: 1, ..blocks },
        Shape { n_heads: 10, block: 130, top_k: 2, past: 500, tokens: 2, ..of_heads },
        Shape { n_near: 0, past: 45, tokens: 4, ..of_heads },
    ]
}

fn large() -> Vec<Shape> {
    let [positions, _, of_heads] = small().try_into().expect("three");
    vec![
        Shape { n_heads: 64, dim: 128, top_k: 2048, past: 9000, tokens: 3, ..positions },
        Shape { n_heads: 4, dim: 128, block: 128, top_k: 16, past: 4000, tokens: 3, ..of_heads },
    ]
}

struct Kernels {
    index: Index,
    attention: Attention,
}

pub fn check(bench: &Bench) -> Result<()> {
    let kernels =
        Kernels { index: Index::load(&bench.gpu)?, attention: Attention::load(&bench.gpu)? };
    let shapes = bench.shapes(&small(), &odd(), &large());
    for ty in CACHE_TYPES {
        let cases: Vec<Case> = shapes.iter().map(|shape| Case::new(bench, ty, *shape)).collect();
        bench.each("index_scores", ty, &cases, |case| case.compare_scores(bench, &kernels.index));
        bench.each("index_choose", ty, &cases, |case| case.compare_choice(bench, &kernels));
    }
    Ok(())
}

struct Case {
    shape: Shape,
    q: Vec<f32>,
    weights: Vec<f32>,
    /// The last keys equal the first.
    keys: Cached,
}

impl Case {
    fn new(bench: &Bench, ty: TensorType, shape: Shape) -> Case {
        let (mut random, dim, n) = (Random(shape.past as u64), shape.dim, shape.n_ctx());
        let mut values = random.floats(n * dim);
        values.copy_within(0..2 * dim, (n - 2) * dim);
        let keys = Cached::new(bench, ty, [1, n, dim], &values, 0);
        let n_queries = shape.tokens * shape.n_heads;
        let [q, weights] = random.vectors([n_queries * dim, n_queries]);
        Case { shape, q, weights, keys }
    }

    fn name(&self) -> String {
        let Shape { n_heads, dim, block, top_k, past, tokens, .. } = self.shape;
        format!("{top_k} blocks of {block}, {tokens} after {past}, {n_heads} heads of {dim}")
    }

    /// Scores of a token's lists.
    fn scores_of(&self, bench: &Bench, token: usize) -> Vec<Vec<f32>> {
        let Shape { scores, n_heads, dim, block, past, .. } = self.shape;
        let n = past + token + 1;
        let q = &self.q[token * n_heads * dim..][..n_heads * dim];
        let list = || vec![0.0; self.shape.n_scores(n)];
        if scores == Scores::Sums {
            let (mut out, weights) = (list(), &self.weights[token * n_heads..][..n_heads]);
            bench.cpu.index_scores(q, weights, self.keys.cpu(), &mut out);
            return vec![out];
        }
        let of_head = |q: &[f32]| {
            let mut out = list();
            bench.cpu.block_scores(q, self.keys.cpu(), n, block, &mut out);
            out
        };
        q.chunks_exact(dim).map(of_head).collect()
    }

    /// The positions in each list of a token.
    fn lists_of(&self, bench: &Bench, token: usize) -> Vec<Vec<u32>> {
        let Shape { scores, block, top_k, n_near, past, .. } = self.shape;
        let n = past + token + 1;
        let list = |mut list: Vec<f32>| -> Vec<u32> {
            if list.len() <= top_k {
                return (0..n as u32).collect();
            }
            let n_whole = list.len();
            list[n_whole - n_near.min(n_whole)..].fill(f32::INFINITY);
            let mut chosen = vec![0; top_k];
            best(&list, &mut Vec::new(), &mut chosen);
            let of_block = |b: &u32| {
                let first = *b as usize * block;
                first..n.min(first + block)
            };
            let tail = if scores == Scores::Sums { n_whole * block..n } else { n..n };
            let positions = chosen.iter().flat_map(of_block).chain(tail);
            positions.map(|position| position as u32).collect()
        };
        self.scores_of(bench, token).into_iter().map(list).collect()
    }

    /// Uploads keys and queries, and calls `of` with them.
    fn on_device<R>(
        &self,
        bench: &Bench,
        of: impl FnOnce(&DeviceIndex, IndexQueries) -> Result<R>,
    ) -> Result<R> {
        let Shape { scores, n_heads, block, top_k, n_near, past, tokens, .. } = self.shape;
        let (keys, past) = (bench.up(self.keys.bytes.to_vec())?, bench.word(past)?);
        let (q, weights) = (bench.up(self.q.to_vec())?, bench.up(self.weights.to_vec())?);
        let (keys, max_seen) = (self.keys.at(&keys.device), self.shape.n_ctx());
        let past = past.gpu();
        let index = DeviceIndex { scores, n_heads, keys, block, top_k, n_near, past, max_seen };
        of(&index, IndexQueries { first: 0, tokens, q: q.gpu(), weights: Some(weights.gpu()) })
    }

    /// The first score of each list that is seen, up to the last.
    fn compare_scores(&self, bench: &Bench, index: &Index) -> Result<()> {
        let tokens = self.shape.tokens;
        let (all, n_lists) = self.on_device(bench, |of_text, queries| {
            let all = bench.empty(tokens * of_text.token_bytes())?;
            // Scores that no token has.
            bench.stream.fill(all.all(), 0)?;
            index.scores(&bench.stream, of_text, queries, all.all())?;
            Ok((bench.down::<f32>(&all)?, of_text.n_lists()))
        })?;
        let mut lists = all.chunks_exact(all.len() / tokens / n_lists);
        let (mut got, mut expected) = (Vec::new(), Vec::new());
        for list in (0..tokens).flat_map(|token| self.scores_of(bench, token)) {
            got.extend(lists.next().expect("a list for each").iter().take(list.len()));
            expected.extend(list);
        }
        bench.equal_values(self.name(), &got, &expected)
    }

    /// Lists, made of some tokens at a time, and attention over the rows of these.
    fn compare_choice(&self, bench: &Bench, kernels: &Kernels) -> Result<()> {
        self.on_device(bench, |index, queries| {
            let (tokens, n_lists, width) = (self.shape.tokens, index.n_lists(), index.width());
            let chosen = bench.empty(4 * tokens * n_lists * width)?;
            let last = bench.empty(4 * tokens * n_lists)?;
            bench.stream.fill(chosen.all(), 0)?;
            let work = bench.empty(index.token_bytes() * tokens.div_ceil(2))?;
            let lists =
                DeviceLists { lists: n_lists, width, chosen: chosen.all(), last: last.all() };
            kernels.index.choose(&bench.stream, index, queries, work.all(), lists)?;

            let expected: Vec<_> =
                (0..tokens).flat_map(|token| self.lists_of(bench, token)).collect();
            let lengths: Vec<u32> = expected.iter().map(|list| list.len() as u32 - 1).collect();
            bench.equal_to(format!("{}: lengths", self.name()), &last, &lengths)?;
            let got: Vec<u32> = bench.down(&chosen)?;
            let got = got.chunks_exact(width).zip(&expected);
            let got: Vec<u32> = got.flat_map(|(got, list)| &got[..list.len()]).copied().collect();
            bench.equal_values(self.name(), &got, &expected.concat())?;
            self.compare_attention(bench, kernels, lists, &expected)
        })
    }

    /// The keys are keys and, as far as they go, values, of as many heads as a token has lists, two
    /// queries each.
    fn compare_attention(
        &self,
        bench: &Bench,
        kernels: &Kernels,
        lists: DeviceLists,
        expected: &[Vec<u32>],
    ) -> Result<()> {
        let (Shape { dim, tokens, .. }, n_lists) = (self.shape, lists.lists);
        let (n_head, v_dim) = (2 * n_lists, dim / 2);
        let q = bench.up(Random(7).floats(tokens * n_head * dim))?;
        let mut out = bench.out(tokens * n_head * v_dim)?;
        let of_cpu = AttentionShape {
            n_head: 2,
            n_head_kv: 1,
            first: 0,
            all: None,
            window: None,
            chunk: None,
            scale: 0.2,
            sinks: None,
            cap: None,
            bias: None,
        };
        let heads = q.chunks_exact(2 * dim).zip(out.host.chunks_exact_mut(2 * v_dim));
        for ((q, out), list) in heads.zip(expected) {
            let mut rows = RowBytes::default();
            let rows = bench.cpu.gather_rows(self.keys.cpu(), list, &mut rows);
            let shape = AttentionShape { all: Some(list.len()), ..of_cpu };
            bench.cpu.attention(shape, q, rows, rows.narrow(v_dim), out);
        }
        // As many heads, which are alike.
        let keys = bench.up(self.keys.bytes.repeat(n_lists))?;
        let rows = DeviceRows { heads: n_lists, ..self.keys.at(&keys.device) };
        let to = bench.empty(tokens * n_lists * lists.width * rows.row_bytes())?;
        // SAFETY: positions are below n_ctx, as was compared.
        let own = unsafe { kernels.index.gather(&bench.stream, rows, lists, tokens, to.all())? };
        let shape = DeviceAttention {
            n_head,
            n_head_kv: n_lists,
            past: lists.last,
            max_seen: lists.width,
            all: None,
            window: None,
            chunk: None,
            scale: 0.2,
            cap: None,
            sinks: None,
            bias: None,
            prompt: true,
            lists: n_lists,
        };
        let work = bench.empty(Attention::work_bytes(n_head, v_dim, self.shape.n_ctx(), 1))?;
        let (work, v) = (work.all(), own.narrow(v_dim));
        let (q, to) = (q.gpu(), out.gpu());
        let data = AttentionData { tokens, q, k: own, v, work, out: to, records: None };
        kernels.attention.launch(&bench.stream, &shape, data)?;
        bench.equal(format!("{}: attention", self.name()), &out)
    }
}
