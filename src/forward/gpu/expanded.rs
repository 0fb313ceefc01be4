//! Latent attention of prompts among heads' own keys and values, which are made of the cached rows.
//!
//! In the compressed space (`mla.rs`) a query of each head takes 2·rank + n_rot multiplications for
//! every position that it sees, and rank·(nope + values) to get there and back. With keys and
//! values of its own these are fewer, head_dim + values, and the rest is needed once for every
//! position that is seen, not for every query. So prompts of many rows are computed this way, on
//! tensor cores, a part of the positions at a time. Its results are not to the bit those of the
//! CPU, and which rows it takes depends on how a prompt is divided: `--exact` turns it off.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::attention::{Attention, AttentionData, DeviceAttention};
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::heads::DeviceHeadMats;
use crate::backend::gpu::latent::LatentRows;
use crate::forward::gpu::bump::BumpLayout;
use crate::forward::gpu::expander::Expander;
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::pass::{GpuPass, GpuSegment, Role};
use crate::forward::gpu::weights::GpuHeads;
use crate::gguf::TensorType;
use crate::model::heads::LatentShape;
use crate::model::weights::{LatentWeights, Sees};
use std::ops::Range;

/// Parts of the positions begin at multiples of this, as tiles of the kernels do.
const TILE: usize = 64;

/// The positions that rows of a segment see.
#[derive(Clone, Copy)]
struct Seen {
    /// The first row's position, and the number of rows.
    past: usize,
    n: usize,
    /// Each row sees so many positions, its own the last.
    window: usize,
}

impl Seen {
    fn by(segment: &GpuSegment, w: &LatentWeights<OnDevice>) -> Seen {
        let window = w.window.unwrap_or(usize::MAX);
        Seen { past: segment.segment.past, n: segment.n(), window }
    }

    /// All positions that some row sees.
    fn range(self) -> Range<usize> {
        (self.past + 1).saturating_sub(self.window)..self.past + self.n
    }

    /// The number of positions, those of each row counted.
    fn n_visits(self) -> usize {
        let Seen { past, n, window } = self;
        // The first rows see less than their window.
        let n_early = window.saturating_sub(past).min(n);
        n_early * past + n_early * (n_early + 1) / 2 + (n - n_early) * window
    }

    /// Whether the rows take fewer multiplications a head with keys and values of their own than in
    /// the compressed space.
    fn pays(self, shape: LatentShape) -> bool {
        let LatentShape { head_dim, head_dim_v, rank, n_rot, .. } = shape;
        let matrices = rank * (head_dim - n_rot + head_dim_v);
        let compressed = self.n_visits() * (2 * rank + n_rot) + self.n * matrices;
        let expanded = self.n_visits() * (head_dim + head_dim_v) + self.range().len() * matrices;
        expanded < compressed
    }
}

/// Memory for keys and values, in what the compressed space would take.
struct Expanded<'a> {
    /// The heads' matrices, f32.
    weights: DeviceSlice<'a>,
    /// See `Attention::piece_work_bytes`.
    work: DeviceSlice<'a>,
    /// Rows for the positions that there is room for.
    keys: DeviceRows<'a>,
    values: DeviceRows<'a>,
}

impl<'a> Expanded<'a> {
    /// For rows that see such positions; `None` if there is no room for a tile of these.
    fn of(
        memory: DeviceSlice<'a>,
        w: &LatentWeights<OnDevice>,
        seen: Seen,
    ) -> Option<Expanded<'a>> {
        let LatentShape { n_head, head_dim, head_dim_v, .. } = w.shape;
        let n_weights = [&w.k_b.all, &w.v_b.all].map(|all| all.rows * all.cols);
        let mut bump = BumpLayout::default();
        let weights = bump.words(n_weights[0].max(n_weights[1]));
        let work = bump.bytes(Attention::piece_work_bytes(n_head, head_dim_v, seen.n));
        // Each begins on a boundary of its own.
        let room = memory.len().checked_sub(bump.n_bytes() + 512)?;
        let fit = room / (2 * n_head * (head_dim + head_dim_v)) / TILE * TILE;
        let Range { start, end } = seen.range();
        let n_ctx = fit.min(end.next_multiple_of(TILE) - start / TILE * TILE);
        let [keys, values] = [head_dim, head_dim_v].map(|dim| bump.bytes(2 * n_head * n_ctx * dim));
        let rows = |range, dim| {
            let data = memory.slice(range);
            DeviceRows { ty: TensorType::F16, data, heads: n_head, dim, stride: dim, n_ctx }
        };
        (n_ctx > 0).then(|| Expanded {
            weights: memory.slice(weights),
            work: memory.slice(work),
            keys: rows(keys, head_dim),
            values: rows(values, head_dim_v),
        })
    }
}

impl<'a> GpuPass<'a> {
    /// The memory for keys and values of their own of a segment's rows, if they get these.
    fn expanded(
        &self,
        w: &LatentWeights<OnDevice>,
        segment: &GpuSegment<'a>,
    ) -> Option<(&'a Expander, Expanded<'a>)> {
        let expander = self.dev.expander.as_ref().filter(|_| !self.dev.is_exact)?;
        let sees_past = self.role == Role::Only && !self.hyper().sees_all;
        let sees_past = sees_past && matches!(w.sees, Sees::All);
        let seen = Seen::by(segment, w);
        if !segment.is_prompt() || !sees_past || !seen.pays(w.shape) {
            return None;
        }
        let rows = LatentRows { rows: segment.cache.of_slot(w.source).0, rank: w.shape.rank };
        let LatentShape { head_dim, head_dim_v, n_rot, .. } = w.shape;
        let is_read = [head_dim - n_rot, head_dim_v].iter().all(|n| rows.have_kernels(*n));
        let memory = self.slice(&self.layout().mixer.latent);
        let expanded = is_read.then(|| Expanded::of(memory, w, seen)).flatten()?;
        let attention = &self.dev.ops.attention;
        let has_kernel = attention.has_prompt_kernel(&expanded.keys, &expanded.values);
        has_kernel.then_some((expander, expanded))
    }

    /// Whether a segment's rows get keys and values of their own.
    pub fn expands(&self, w: &LatentWeights<OnDevice>, segment: &GpuSegment<'a>) -> bool {
        self.expanded(w, segment).is_some()
    }

    /// q → out, of a segment that expands: f32 [rows, n_head, head_dim] → [.., head_dim_v]
    pub fn attend_expanded(
        &self,
        w: &LatentWeights<OnDevice>,
        segment: &GpuSegment<'a>,
        q: DeviceSlice<'a>,
        out: DeviceSlice<'a>,
    ) -> Result<()> {
        let (expander, Expanded { weights, work, keys, values }) =
            self.expanded(w, segment).expect("a segment that expands");
        let LatentShape { n_head, head_dim, head_dim_v, rank, .. } = w.shape;
        let from = LatentRows { rows: segment.cache.of_slot(w.source).0, rank };
        let (expand, stream) = (&expander.expand, self.stream());
        let Range { start, end } = Seen::by(segment, w).range();
        let view = DeviceAttention { n_head_kv: n_head, ..self.latent_view(w, segment) };
        let data = AttentionData {
            tokens: segment.n(),
            q: segment.of(q, n_head * head_dim),
            k: keys,
            v: values,
            work,
            out: segment.of(out, n_head * head_dim_v),
            records: None,
        };
        for begin in (start / TILE * TILE..end).step_by(keys.n_ctx) {
            let range = begin..end.min(begin + keys.n_ctx);
            let k_b = self.decoded_heads(expander, &w.k_b, weights)?;
            expand.keys(stream, from, range.clone(), k_b, keys)?;
            let v_b = self.decoded_heads(expander, &w.v_b, weights)?;
            expand.values(stream, from, range, v_b, values)?;
            self.dev.ops.attention.launch_piece(stream, &view, data, begin)?;
        }
        Ok(())
    }

    /// Heads' matrices as f32, in `memory` if they are of another type.
    fn decoded_heads(
        &self,
        expander: &Expander,
        heads: &GpuHeads,
        memory: DeviceSlice<'a>,
    ) -> Result<DeviceHeadMats<'a>> {
        let (mat, ids) = (self.dev.weights.mat(&heads.all), self.slice(&self.layout().iota));
        let GpuHeads { n_heads, rows, first, step, .. } = *heads;
        let all = expander.decode(self.stream(), mat, ids, memory)?;
        Ok(DeviceHeadMats { all, n_heads, rows, first, step })
    }

    /// The view of all heads on the compressed rows of their text.
    pub fn latent_view(
        &self,
        w: &LatentWeights<OnDevice>,
        segment: &GpuSegment<'a>,
    ) -> DeviceAttention<'a> {
        DeviceAttention {
            n_head: w.shape.n_head,
            n_head_kv: 1,
            window: w.window,
            scale: w.scale,
            sinks: w.sinks.as_ref().map(|sinks| self.dev.weights.vector(sinks)),
            ..self.view(segment)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEEPSEEK: LatentShape =
        LatentShape { n_head: 128, head_dim: 192, head_dim_v: 128, rank: 512, n_rot: 64 };

    fn seen(n: usize, past: usize, window: usize) -> Seen {
        Seen { past, n, window }
    }

    #[test]
    fn prompts_pay_from_some_rows_on() {
        let pays = |n, past| seen(n, past, usize::MAX).pays(DEEPSEEK);
        assert!(pays(1, 0) && pays(512, 0));
        // 768 multiplications fewer for each pair, 131072 more for each position before.
        assert!(pays(171, 100_000) && !pays(170, 100_000));
        assert!(!pays(1, 512));
        // Behind a window no more than its positions are expanded.
        let pays = |n| seen(n, 100_000, 1024).pays(DEEPSEEK);
        assert!(pays(171) && !pays(170));
        // Compressed rows that are short enough are as good as keys.
        assert!(!seen(512, 512, usize::MAX).pays(LatentShape { rank: 100, ..DEEPSEEK }));
    }

    #[test]
    fn rows_see_their_window() {
        for (n, past, window) in
            [(5, 0, 3), (5, 2, 3), (5, 3, 3), (5, 9, 3), (4, 1, 8), (9, 7, usize::MAX), (1, 4, 1)]
        {
            let of_row = |i: usize| (past + i + 1).saturating_sub(window)..past + i + 1;
            let rows = seen(n, past, window);
            assert_eq!(rows.range(), of_row(0).start..of_row(n - 1).end);
            assert_eq!(rows.n_visits(), (0..n).map(|i| of_row(i).len()).sum::<usize>());
        }
    }
}
