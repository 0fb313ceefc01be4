//! Compressed rows of a text's blocks, the rows that are kept for the next ones, and the rows that
//! tokens see side by side.

use super::{Bench, Random, try_map};
use crate::Result;
use crate::backend::cpu::compress::ScoredRow;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::compress::{Blocks, Compress, DeviceCompressor, Seen, TextRows};
use crate::backend::gpu::index::{DeviceLists, Scores, list_width};
use crate::backend::gpu::rope::DeviceCosSin;
use crate::backend::ops::{Frequencies, RopePairing, RopeShape};
use crate::gguf::TensorType;

const EPS: f32 = 1e-6;
const N_ROT: usize = 8;

/// A compressor, and the rows of passes that follow one another.
#[derive(Clone, Copy)]
struct Case {
    dim: usize,
    ratio: usize,
    overlaps: bool,
    passes: [usize; 4],
}

pub fn check(bench: &Bench) -> Result<()> {
    let kernels = Compress::load(&bench.gpu)?;
    let case = |dim, ratio, overlaps, passes| Case { dim, ratio, overlaps, passes };
    let cases = bench.shapes(
        &[case(64, 4, true, [3, 1, 9, 2]), case(128, 5, false, [7, 1, 2, 6])],
        &[case(24, 3, true, [1, 1, 1, 4])],
        &[case(512, 4, true, [300, 1, 5, 2]), case(512, 128, false, [500, 1, 11, 1])],
    );
    bench.each("compress_rows", "f32", cases, |case| case.compare(bench, &kernels));
    bench.each("gather_seen", "", [None, Some(2)], |chosen| gather(bench, &kernels, chosen));
    Ok(())
}

impl Case {
    fn width(&self) -> usize {
        self.dim * (1 + usize::from(self.overlaps))
    }

    /// The row of the block that ends before position `end`, of all positions' rows and scores.
    fn expected(&self, bench: &Bench, all: [&[f32]; 2], norm: &[f32], end: usize) -> Vec<f32> {
        let (dim, width, begin) = (self.dim, self.width(), end - self.ratio);
        let own = if self.overlaps { dim } else { 0 };
        let before = if self.overlaps { begin.saturating_sub(self.ratio)..begin } else { 0..0 };
        let row = |position: usize, first: usize| {
            let [values, scores] = all.map(|all| &all[position * width + first..][..dim]);
            ScoredRow { values, scores }
        };
        let rows = before.map(|p| row(p, 0)).chain((begin..end).map(|p| row(p, own)));
        let mut out = vec![0.0; dim];
        bench.cpu.compress_rows(rows, &mut Vec::new(), &mut out);
        bench.cpu.rms_norm_heads(&mut out, norm, EPS);
        let mut turn = RopeTable::default();
        turn.fill(&frequencies(), begin, 1);
        bench.cpu.rope(&mut out, rope_shape(dim), &turn);
        out
    }

    fn compare(&self, bench: &Bench, kernels: &Compress) -> Result<()> {
        let Case { dim, ratio, overlaps, passes } = *self;
        let (width, n) = (self.width(), passes.iter().sum::<usize>());
        let mut random = Random(dim as u64);
        let [values, scores] = random.vectors([n * width; 2]);
        let [places, norm] = bench.floats(&mut random, [ratio * width, dim])?;
        let of_place = |i: usize| places[i / width % ratio * width + i % width];
        let placed: Vec<f32> = (0..n * width).map(|i| scores[i] + of_place(i)).collect();
        let (places, norm_up) = (places.gpu(), norm.gpu());
        let own = DeviceCompressor { dim, ratio, overlaps, places, norm: norm_up, eps: EPS };
        let kept = bench.up(vec![0.0; 2 * own.n_kept() * width])?;
        let mut past = 0;
        for tokens in passes {
            let rows = past * width..(past + tokens) * width;
            let [v, s] = try_map([&values, &scores], |all| bench.up(all[rows.clone()].to_vec()))?;
            let blocks = past / ratio..(past + tokens) / ratio;
            // A block before the first one of the pass, as of a pass in parts; one that is not
            // whole behind the last.
            let (skipped, n_blocks) = (blocks.start.min(1), blocks.len() + 1);
            let first = past.min(1);
            let (first_past, block) =
                (bench.word(past - first)?, bench.word(blocks.start - skipped)?);
            let mut turns = RopeTable::default();
            for block in blocks.start - skipped..blocks.end + 1 {
                turns.push(&frequencies(), block * ratio, 1);
            }
            let turns = bench.up(turns.turns().as_flattened().to_vec())?;
            let mut out = bench.up(vec![7.0; n_blocks * dim])?;
            let (v, s, past_up) = (v.gpu(), s.gpu(), first_past.gpu());
            let text = TextRows { values: v, scores: s, kept: kept.gpu(), past: past_up, first };
            let cos_sin = DeviceCosSin { data: turns.gpu(), n_pairs: N_ROT / 2, back: false };
            let (block, pairing) = (block.gpu(), RopePairing::Adjacent);
            let of = Blocks { n: n_blocks, block, skipped, cos_sin, pairing, out: out.gpu() };
            kernels.compress(&bench.stream, &own, &text, &of)?;
            kernels.keep(&bench.stream, &own, &text)?;
            for (block, to) in blocks.zip(out.chunks_exact_mut(dim)) {
                let all = [&values[..], &placed[..]];
                to.copy_from_slice(&self.expected(bench, all, &norm, (block + 1) * ratio));
            }
            bench.equal(format!("{tokens} after {past}, {ratio} of {dim}"), &out)?;
            past += tokens;
        }
        Ok(())
    }
}

fn frequencies() -> Frequencies {
    Frequencies::new((0..N_ROT / 2).map(|i| 0.9f32.powi(i as i32)).collect(), 1.0)
}

fn rope_shape(dim: usize) -> RopeShape {
    RopeShape { head_dim: dim, offset: dim - N_ROT, pairing: RopePairing::Adjacent }
}

/// A list of the positions of blocks; what is behind them is no block's.
fn positions(blocks: &[u32], ratio: usize, width: usize) -> Vec<u32> {
    let ratio = ratio as u32;
    let of_block = |block: &u32| block * ratio..(block + 1) * ratio;
    let mut all: Vec<u32> = blocks.iter().flat_map(of_block).collect();
    all.resize(width, u32::MAX);
    all
}

/// Rows of tokens whose window is not full at first, blocks of two rows of which the last is the
/// block's, and a choice among them.
fn gather(bench: &Bench, kernels: &Compress, chosen: Option<usize>) -> Result<()> {
    const N_CTX: usize = 23;
    const WINDOW: usize = 3;
    const RATIO: usize = 4;
    const PAGES: usize = 2;
    const WORDS: usize = 5;
    let (past, tokens, n_rows) = (1, 21, WINDOW + N_CTX / RATIO);
    let numbers = |first: u32, n: usize| -> Vec<u32> { (first..first + n as u32).collect() };
    let own = numbers(1000, N_CTX * WORDS);
    let blocks = numbers(5000, N_CTX / RATIO * PAGES * WORDS);
    let ids: Vec<u32> = (0..tokens).flat_map(|t| [(t % 2) as u32, 2]).collect();
    let width = list_width(Scores::Sums, 2, RATIO);
    let lists: Vec<u32> =
        ids.chunks_exact(2).flat_map(|ids| positions(ids, RATIO, width)).collect();
    let (mut expected, mut last) = (vec![0; tokens * n_rows * WORDS], Vec::new());
    for (t, to) in expected.chunks_exact_mut(n_rows * WORDS).enumerate() {
        let n_seen = past + t + 1;
        let near = n_seen.saturating_sub(WINDOW)..n_seen;
        let n_blocks = n_seen / RATIO;
        let far: Vec<usize> = match chosen.filter(|n| n_blocks > *n) {
            Some(n) => ids[t * n..(t + 1) * n].iter().map(|id| *id as usize).collect(),
            None => (0..n_blocks).collect(),
        };
        let of = |all: &[u32], i: usize| all[i * WORDS..(i + 1) * WORDS].to_vec();
        let rows = near.map(|i| of(&own, i));
        let rows = rows.chain(far.iter().map(|block| of(&blocks, (block + 1) * PAGES - 1)));
        let words: Vec<u32> = rows.flatten().collect();
        to[..words.len()].copy_from_slice(&words);
        last.push((words.len() / WORDS - 1) as u32);
    }
    let (own, blocks) = (bench.up(own)?, bench.up(blocks)?);
    let (to, last_up) = (bench.up(vec![0u32; expected.len()])?, bench.empty(4 * tokens)?);
    let (lists, past) = (bench.up(lists)?, bench.word(past)?);
    let rows = |data, n_ctx| DeviceRows {
        ty: TensorType::F32,
        data,
        heads: 1,
        dim: WORDS,
        stride: WORDS,
        n_ctx,
    };
    let lists = DeviceLists { lists: 1, width, chosen: lists.gpu(), last: last_up.all() };
    let seen = Seen {
        own: rows(own.gpu(), N_CTX),
        blocks: rows(blocks.gpu(), N_CTX / RATIO * PAGES),
        pages: PAGES,
        ratio: RATIO,
        window: WINDOW,
        chosen: chosen.map(|n| (lists, n)),
        past: past.gpu(),
        first: 0,
        to: rows(to.gpu(), n_rows),
        last: last_up.all(),
    };
    // SAFETY: tokens that choose see at least three blocks.
    unsafe { kernels.gather(&bench.stream, &seen)? };
    let name = format!("{tokens} tokens, chosen {chosen:?}");
    bench.equal_to(format!("{name}: rows"), &to.device, &expected)?;
    bench.equal_to(format!("{name}: last rows"), &last_up, &last)
}
