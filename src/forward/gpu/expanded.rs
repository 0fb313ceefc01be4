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
use crate::forward::gpu::index_layers::GpuSees;
use crate::forward::gpu::layers::GpuLatent;
use crate::forward::gpu::pass::{GpuPass, GpuSegment, Role};
use crate::forward::gpu::weights::GpuHeads;
use crate::gguf::TensorType;
use crate::model::heads::LatentShape;

/// Parts of the positions begin at multiples of this, as tiles of the kernels do.
const TILE: usize = 64;

/// Whether `n` rows behind `past` take fewer multiplications a head with keys and values of their
/// own than in the compressed space.
fn pays(shape: LatentShape, n: usize, past: usize) -> bool {
    let LatentShape { head_dim, head_dim_v, rank, n_rot, .. } = shape;
    let pairs = n * past + n * (n + 1) / 2;
    let matrices = rank * (head_dim - n_rot + head_dim_v);
    let compressed = pairs * (2 * rank + n_rot) + n * matrices;
    pairs * (head_dim + head_dim_v) + (past + n) * matrices < compressed
}

/// Memory for keys and values, in what the compressed space would take.
struct Expanded<'a> {
    /// The heads' matrices, f32.
    weights: DeviceSlice<'a>,
    /// See `Attention::piece_work_bytes`.
    work: DeviceSlice<'a>,
    /// As many positions as there is room for.
    keys: DeviceRows<'a>,
    values: DeviceRows<'a>,
}

impl<'a> Expanded<'a> {
    /// For `n` rows that see `n_seen` positions; `None` if there is no room for a tile of them.
    fn of(memory: DeviceSlice<'a>, w: &GpuLatent, n: usize, n_seen: usize) -> Option<Expanded<'a>> {
        let LatentShape { n_head, head_dim, head_dim_v, .. } = w.shape;
        let n_weights = [&w.k_b.all, &w.v_b.all].map(|all| all.rows * all.cols);
        let mut bump = BumpLayout::default();
        let weights = bump.words(n_weights[0].max(n_weights[1]));
        let work = bump.bytes(Attention::piece_work_bytes(n_head, head_dim_v, n));
        // Each begins on a boundary of its own.
        let room = memory.len().checked_sub(bump.n_bytes() + 512)?;
        let fit = room / (2 * n_head * (head_dim + head_dim_v)) / TILE * TILE;
        let n_ctx = fit.min(n_seen.next_multiple_of(TILE));
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
        l: usize,
        w: &GpuLatent,
        segment: &GpuSegment<'a>,
    ) -> Option<(&'a Expander, Expanded<'a>)> {
        let expander = self.dev.expander.as_ref().filter(|_| !self.dev.is_exact)?;
        let sees_past = self.role == Role::Only && !self.hyper().sees_all && w.window.is_none();
        let sees_past = sees_past && matches!(w.sees, GpuSees::All);
        let (n, past) = (segment.n(), segment.segment.past);
        if !segment.is_prompt() || !sees_past || !pays(w.shape, n, past) {
            return None;
        }
        let rows = LatentRows { rows: segment.cache.of_slot(l).0, rank: w.shape.rank };
        let LatentShape { head_dim, head_dim_v, n_rot, .. } = w.shape;
        let is_read = [head_dim - n_rot, head_dim_v].iter().all(|n| rows.have_kernels(*n));
        let memory = self.slice(&self.layout().mixer.latent);
        let expanded = is_read.then(|| Expanded::of(memory, w, n, past + n)).flatten()?;
        let attention = &self.dev.ops.attention;
        let has_kernel = attention.has_prompt_kernel(&expanded.keys, &expanded.values);
        has_kernel.then_some((expander, expanded))
    }

    /// Whether a segment's rows get keys and values of their own.
    pub fn expands(&self, l: usize, w: &GpuLatent, segment: &GpuSegment<'a>) -> bool {
        self.expanded(l, w, segment).is_some()
    }

    /// q → out, of a segment that expands: f32 [rows, n_head, head_dim] → [.., head_dim_v]
    pub fn attend_expanded(
        &self,
        l: usize,
        w: &GpuLatent,
        segment: &GpuSegment<'a>,
        q: DeviceSlice<'a>,
        out: DeviceSlice<'a>,
    ) -> Result<()> {
        let (expander, Expanded { weights, work, keys, values }) =
            self.expanded(l, w, segment).expect("a segment that expands");
        let LatentShape { n_head, head_dim, head_dim_v, rank, .. } = w.shape;
        let from = LatentRows { rows: segment.cache.of_slot(l).0, rank };
        let (expand, stream, n_seen) =
            (&expander.expand, self.stream(), segment.segment.past + segment.n());
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
        for begin in (0..n_seen).step_by(keys.n_ctx) {
            let range = begin..n_seen.min(begin + keys.n_ctx);
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
    pub fn latent_view(&self, w: &GpuLatent, segment: &GpuSegment<'a>) -> DeviceAttention<'a> {
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

    #[test]
    fn prompts_pay_from_some_rows_on() {
        assert!(pays(DEEPSEEK, 1, 0) && pays(DEEPSEEK, 512, 0));
        // 768 multiplications fewer for each pair, 131072 more for each position before.
        assert!(pays(DEEPSEEK, 171, 100_000) && !pays(DEEPSEEK, 170, 100_000));
        assert!(!pays(DEEPSEEK, 1, 512));
        // Compressed rows that are short enough are as good as keys.
        assert!(!pays(LatentShape { rank: 100, ..DEEPSEEK }, 512, 512));
    }
}
