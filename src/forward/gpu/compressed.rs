//! Attention to a window and to compressed rows of what is before it on a device: the stages of
//! `forward::compressed`.

use crate::Result;
use crate::backend::cpu::rope::RopeTable;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::attention::DeviceAttention;
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::compress::{Blocks, Seen, TextRows};
use crate::backend::gpu::rope::DeviceCosSin;
use crate::forward::gpu::acts::RowShape;
use crate::forward::gpu::compressed_layers::n_rows_seen;
use crate::forward::gpu::mixer::GpuMixer;
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::pass::{GpuPass, GpuSegment};
use crate::forward::gpu::weights::GpuLinear;
use crate::model::compressed::RATIOS;
use crate::model::hyper::HyperParams;
use crate::model::kv::PAGE;
use crate::model::weights::{CompressedWeights, Compressor};

/// The first block of rows that complete none: its place is in no cache.
const NO_BLOCK: u32 = 1 << 31;

/// The place of a ratio's buffers.
fn kind_of(ratio: usize) -> usize {
    RATIOS.iter().position(|known| *known == ratio).expect("a ratio that is known")
}

/// The rows of blocks from `first` on.
fn rows_of_blocks(
    packed: DeviceRows<'_>,
    dim: usize,
    ratio: usize,
    first: usize,
) -> DeviceRows<'_> {
    let (all, pages) = (packed.unpacked(dim), ratio.div_ceil(PAGE));
    let start = (pages * (first + 1) - 1) * all.row_bytes();
    let data = all.data.slice(start.min(all.data.len())..all.data.len());
    let n_ctx = (all.n_ctx / pages).saturating_sub(first);
    DeviceRows { data, stride: pages * dim, n_ctx, ..all }
}

impl GpuMixer for CompressedWeights<OnDevice> {
    fn mix(&self, cx: &mut GpuPass, l: usize) -> Result<()> {
        let (n, dim, n_rot) = (cx.n(), self.head_dim, cx.hyper().rope.n_rot);
        cx.compressed_products(l, self)?;
        let (m, width) = (&cx.layout().mixer, self.n_head * dim);
        let (q, row) = (cx.words(&m.q, n * width), cx.words(&m.k, n * dim));
        let (shape, table) = (cx.model.rope_shape(dim, dim - n_rot), cx.rope_table(self.slides));
        cx.rope(q, shape, table)?;
        cx.rope(row, shape, table)?;
        // cache: rows, then what they make
        for segment in cx.segments() {
            let (rows, _) = segment.cache.of_slot(l);
            cx.store(&segment, row, rows)?;
        }
        cx.compress(l, self)?;
        if self.chooser.is_some() {
            cx.choose_rows(l)?;
        }
        // attention, each text over its own cache
        let attended = cx.words(&m.attended, n * width);
        for segment in cx.segments() {
            cx.attend_compressed(l, self, &segment, q, attended)?;
        }
        // back by the token's position, output
        cx.rope(attended, shape, DeviceCosSin { back: true, ..table })?;
        let heads = n * self.output_a.n_heads;
        let grouped = cx.words(&cx.layout().compressed.grouped, heads * self.output_a.rows);
        let groups = RowShape { n: heads, cols: self.output_a.all.cols };
        cx.head_products(&self.output_a, groups, attended, grouped)?;
        let output = &self.output_b;
        let shape = RowShape { n, cols: output.weight.cols };
        let acts = cx.mixer_acts([output.weight.ty], shape, grouped)?;
        cx.linear(output, &acts, cx.y())
    }

    fn output(&self) -> Option<&GpuLinear> {
        None
    }

    fn state_slot(&self, hyper: &HyperParams, l: usize) -> Option<usize> {
        (!self.compressors.is_empty()).then(|| hyper.second_slot(l))
    }
}

impl<'a> GpuPass<'a> {
    /// Uploads which blocks the pass's rows complete, and the turns of their rows.
    pub fn upload_blocks(&mut self) -> Result<()> {
        let kept = self.kept();
        if self.hyper().compressed.is_none() {
            return Ok(());
        }
        let (stream, n_rot) = (self.stream(), self.hyper().rope.n_rot);
        for (kind, ratio) in RATIOS.into_iter().enumerate() {
            let mut firsts = Vec::new();
            for segment in self.segments() {
                let past = segment.segment.past;
                let blocks = past / ratio..(past + segment.n()) / ratio;
                firsts.push(if blocks.is_empty() { NO_BLOCK } else { blocks.start as u32 });
                let mut turns = RopeTable::default();
                for block in blocks {
                    turns.push(self.model.frequencies(segment.cache.n_ctx()), block * ratio, 1);
                }
                let turns = turns.turns().as_flattened();
                if !turns.is_empty() {
                    let all = self.words(&kept.block_cos_sin[kind], self.n() * n_rot);
                    let to = segment.of(all, n_rot).slice(0..4 * turns.len());
                    self.state.staging.upload(stream, to, turns, f32::to_le_bytes)?;
                }
            }
            let to = self.words(&kept.blocks[kind], firsts.len());
            self.state.staging.upload(stream, to, &firsts, u32::to_le_bytes)?;
        }
        Ok(())
    }

    /// x → q [tokens, n_head, head_dim] and k [tokens, head_dim], which are not rotated, the
    /// compressors' values and scores, and an indexer's queries and weights
    fn compressed_products(&self, l: usize, w: &CompressedWeights<OnDevice>) -> Result<()> {
        let (n, m, c) = (self.n(), &self.layout().mixer, &self.layout().compressed);
        let (norm, stream, eps) = (&self.dev.ops.norm, self.stream(), self.hyper().norm_eps);
        let vector = |vector| self.dev.weights.vector(vector);
        let made = w.compressors.iter().flat_map(Compressor::linears);
        let chooser = w.chooser.as_ref();
        let weights = chooser.map(|chooser| &chooser.weights);
        let inputs = [&w.q_a, &w.row].into_iter().chain(made).chain(weights);
        let acts = self.mixer_input(l, inputs.map(|linear| linear.weight.ty))?;
        let rank = w.q_a.weight.rows;
        let (ranks, row) = (self.words(&m.compressed, n * rank), self.words(&m.k, n * w.head_dim));
        self.linear(&w.q_a, &acts, ranks)?;
        self.linear(&w.row, &acts, row)?;
        // What is chosen does not depend on rounding.
        let acts = acts.exact();
        for (i, made) in w.compressors.iter().enumerate() {
            for (linear, to) in made.linears().zip([&c.values[i], &c.scores[i]]) {
                self.linear(linear, &acts, self.words(to, n * linear.weight.rows))?;
            }
        }
        let i = &self.layout().index;
        if let Some(weights) = weights {
            self.linear(weights, &acts, self.words(&i.weights, n * weights.weight.rows))?;
        }
        norm.rms_norm_heads(stream, row, vector(&w.row_norm), eps)?;
        norm.rms_norm_heads(stream, ranks, vector(&w.q_a_norm), eps)?;
        let q = self.words(&m.q, n * w.n_head * w.head_dim);
        let second = chooser.map(|chooser| &chooser.q);
        let types = [&w.q_b].into_iter().chain(second).map(|linear| linear.weight.ty);
        let acts = self.mixer_acts(types, RowShape { n, cols: rank }, ranks)?;
        if let Some(second) = second {
            self.linear(second, &acts.exact(), self.words(&i.q, n * second.weight.rows))?;
        }
        self.linear(&w.q_b, &acts, q)?;
        w.ones.as_ref().map_or(Ok(()), |ones| norm.rms_norm_heads(stream, q, vector(ones), eps))
    }

    /// Stores the compressed rows of blocks that the pass's rows complete, and keeps the rows that
    /// the next ones need.
    fn compress(&mut self, l: usize, w: &CompressedWeights<OnDevice>) -> Result<()> {
        let Some(ratio) = w.compressors.first().map(|compressor| compressor.ratio) else {
            return Ok(());
        };
        let (dev, batch, hyper, is_decode) = (self.dev, self.batch, self.hyper(), self.is_decode());
        let (n, c, stream, kept) =
            (self.n(), &self.layout().compressed, self.stream(), self.kept());
        let kind = kind_of(ratio);
        let words = |range| self.words(range, batch.n_segments());
        let (pasts, firsts) = (words(&kept.past), words(&kept.blocks[kind]));
        let (n_rot, pairing) = (hyper.rope.n_rot, self.model.rope_shape(w.head_dim, 0).pairing);
        let turns = self.words(&kept.block_cos_sin[kind], n * n_rot);
        let of_rows = |i: usize, width: usize| {
            [&c.values[i], &c.scores[i]].map(|range| dev.workspace.words(range, n * width))
        };
        let room = dev.workspace.slice(&c.rows);
        self.over_states(hyper.second_slot(l), |part, [kept, _]| {
            let (rows, segment) = batch.segments().nth(part.index).expect("a text of the batch");
            let first = part.rows.start - rows.start;
            let (start, end) = (segment.past + first, segment.past + first + part.n());
            let skipped = start / ratio - segment.past / ratio;
            // A decoded token's graph serves rows that complete a block and those that do not.
            let n_blocks = if is_decode { 1 } else { end / ratio - start / ratio };
            let (keys, index) = part.cache.of_slot(2 * hyper.n_layers + l);
            let mut at = 0;
            for ((i, own), packed) in w.compressors.iter().enumerate().zip([Some(keys), index]) {
                let own = own.on(&dev.weights, hyper.norm_eps);
                let (width, size) = (own.width(), 2 * own.n_kept() * own.width());
                let [values, scores] = of_rows(i, width).map(|all| part.of(all, width));
                let (kept, past) = (kept.slice(4 * at..4 * (at + size)), part.word(pasts));
                let text = TextRows { values, scores, kept, past, first };
                at += size;
                let data = turns.slice(4 * rows.start * n_rot..turns.len());
                let cos_sin = DeviceCosSin { data, n_pairs: n_rot / 2, back: false };
                let (block, out) = (part.word(firsts), room.slice(0..4 * n_blocks * own.dim));
                let blocks = Blocks { n: n_blocks, block, skipped, cos_sin, pairing, out };
                dev.ops.compress.compress(stream, &own, &text, &blocks)?;
                let packed = packed.expect("a place for each compressor's rows");
                let to = rows_of_blocks(packed, own.dim, ratio, skipped);
                dev.ops.store.store(stream, out, n_blocks, block, to)?;
                dev.ops.compress.keep(stream, &own, &text)?;
            }
            Ok(())
        })
    }

    /// q → attended, of a text's rows over its own cache
    fn attend_compressed(
        &self,
        l: usize,
        w: &CompressedWeights<OnDevice>,
        segment: &GpuSegment<'a>,
        q: DeviceSlice<'a>,
        attended: DeviceSlice<'a>,
    ) -> Result<()> {
        let (own, _) = segment.cache.of_slot(l);
        let view = DeviceAttention {
            n_head: w.n_head,
            n_head_kv: 1,
            sinks: Some(self.dev.weights.vector(&w.sinks)),
            ..self.view(segment)
        };
        let Some(compressor) = w.compressors.first() else {
            let view = DeviceAttention { window: Some(w.window), ..view };
            return self.attend(segment, &view, q, [own; 2], attended);
        };
        let (c, ratio, max_seen) =
            (&self.layout().compressed, compressor.ratio, self.max_seen(segment));
        let (packed, _) = segment.cache.of_slot(2 * self.hyper().n_layers + l);
        let n_rows = n_rows_seen(w.window, ratio, self.hyper(), max_seen);
        let (room, token) = (self.slice(&c.seen), n_rows * own.row_bytes());
        let at_once = (room.len() / token).min(c.last.len() / 4);
        let chooses = w.chooser.as_ref().and(self.hyper().indexer.as_ref());
        for first in (0..segment.n()).step_by(at_once) {
            let start = segment.rows.start + first;
            let rows = start..segment.rows.end.min(start + at_once);
            let part = GpuSegment { rows, ..segment.clone() };
            let (data, last) = (room.slice(0..part.n() * token), self.words(&c.last, part.n()));
            let to = DeviceRows { data, heads: part.n(), n_ctx: n_rows, ..own };
            let seen = Seen {
                own,
                blocks: packed.unpacked(w.head_dim),
                pages: ratio.div_ceil(PAGE),
                ratio,
                window: w.window,
                chosen: chooses
                    .map(|params| (self.lists().of_tokens(start, part.n()), params.top_k)),
                past: self.past(segment),
                first,
                to,
                last,
            };
            // SAFETY: the lists have positions of blocks that the tokens see.
            unsafe { self.dev.ops.compress.gather(self.stream(), &seen)? };
            let view = DeviceAttention { past: last, lists: 1, max_seen: n_rows, ..view };
            self.attend(&part, &view, q, [to; 2], attended)?;
        }
        Ok(())
    }
}
