//! What mixes positions, on a device: the stages of `model::mixer`, operation by operation.

use super::acts::GpuActs;
use super::layers::{GpuAttention, GpuLatent, GpuMixer, GpuQuery};
use super::pass::{Pass, Text};
use super::weights::{GpuLinear, GpuVector};
use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::attention::DeviceAttention;
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::rope::DeviceTurns;
use crate::backend::gpu::rows::Columns;
use crate::backend::ops::RopeShape;

impl<'a> Pass<'a> {
    /// h → y
    pub fn mix(&self, l: usize, mixer: &GpuMixer) -> Result<()> {
        match mixer {
            GpuMixer::Attention(w) => self.attention(l, w),
            GpuMixer::Latent(w) => self.latent_attention(l, w),
            GpuMixer::Delta(w) => self.delta_rule(l, w),
        }
    }

    fn attention(&self, l: usize, w: &GpuAttention) -> Result<()> {
        let (hyper, m, n) = (self.hyper(), &self.layout().mixer, self.n);
        let (heads, heads_kv) = (n * hyper.n_head, n * hyper.n_head_kv);
        // q, k, v
        let acts = self.acts_of_h([&w.q, &w.k, &w.v].map(|linear| linear.weight.ty))?;
        let q = self.words(&m.q, heads * hyper.head_dim);
        let k = self.words(&m.k, heads_kv * hyper.head_dim);
        let v = self.words(&m.v, heads_kv * hyper.head_dim_v);
        if w.gated {
            self.split_gates(w, &acts, q)?;
        } else {
            self.linear(&w.q, &acts, q)?;
        }
        self.linear(&w.k, &acts, k)?;
        self.linear(&w.v, &acts, v)?;
        // QK-norm
        self.norm_heads(&w.q_norm, q)?;
        self.norm_heads(&w.k_norm, k)?;
        // RoPE
        if self.text == Text::Only {
            let shape = self.model.rope_shape(hyper.head_dim, hyper.rope_offset);
            self.rope(q, shape)?;
            self.rope(k, shape)?;
        }
        // cache
        let (keys, values) = self.own_rows(l);
        self.store(k, keys)?;
        self.store(v, values)?;
        // attention
        let attended = self.words(&m.attended, heads * hyper.head_dim_v);
        let sinks = w.sinks.as_ref().map(|sinks| self.dev.weights.vector(sinks));
        let view = DeviceAttention { window: w.window, sinks, ..self.view() };
        self.attend(&view, q, keys, values, attended)?;
        if w.gated {
            let gate = self.words(&m.gate, heads * hyper.head_dim_v);
            self.dev.ops.rows.mul_sigmoid(self.stream(), attended, gate)?;
        }
        self.attention_output(&w.output)
    }

    /// [q, gate] a head → q and gate
    fn split_gates(&self, w: &GpuAttention, acts: &GpuActs, q: DeviceSlice) -> Result<()> {
        let (hyper, m, rows) = (self.hyper(), &self.layout().mixer, &self.dev.ops.rows);
        let (dim, heads) = (hyper.head_dim, self.n * hyper.n_head);
        let raw = self.words(&m.raw, 2 * heads * dim);
        self.linear(&w.q, acts, raw)?;
        let gate = self.words(&m.gate, heads * dim);
        for (first, to) in [(0, q), (dim, gate)] {
            let (from, to) = (Columns::new(raw, 2 * dim, first), Columns::new(to, dim, 0));
            rows.copy_columns(self.stream(), from, to, dim, heads)?;
        }
        Ok(())
    }

    fn norm_heads(&self, norm: &Option<GpuVector>, x: DeviceSlice) -> Result<()> {
        let Some(norm) = norm else { return Ok(()) };
        let (norm, eps) = (self.dev.weights.vector(norm), self.hyper().norm_eps);
        self.dev.ops.norm.rms_norm_heads(self.stream(), x, norm, eps)
    }

    fn rope(&self, x: DeviceSlice, shape: RopeShape) -> Result<()> {
        let (layout, n_pairs) = (self.layout(), self.hyper().rope.n_rot / 2);
        let turns = self.words(&layout.turns, 2 * self.n * n_pairs);
        let rows = self.words(&layout.iota, self.n);
        // SAFETY: row t of the table is token t's; `iota` counts from 0.
        unsafe {
            self.dev.ops.rope.launch(self.stream(), x, shape, DeviceTurns { turns, n_pairs }, rows)
        }
    }

    pub fn store(&self, x: DeviceSlice, rows: DeviceRows) -> Result<()> {
        let past = self.words(&self.layout().past, 1);
        self.dev.ops.store.store(self.stream(), x, self.n, past, rows)
    }

    /// Where the keys and values of layer `l` are that its own tokens have.
    fn own_rows(&self, l: usize) -> (DeviceRows<'a>, DeviceRows<'a>) {
        if self.text == Text::Source {
            return self.encoder_rows();
        }
        let (keys, values) = self.cache.of_slot(self.slots(l).own);
        (keys, values.expect("values beside the keys"))
    }

    /// What queries see of their own text.
    pub fn view(&self) -> DeviceAttention<'a> {
        DeviceAttention {
            n_head: self.hyper().n_head,
            n_head_kv: self.hyper().n_head_kv,
            past: self.words(&self.layout().past, 1),
            max_seen: self.max_seen,
            all: (self.text == Text::Source).then_some(self.n),
            window: None,
            scale: self.hyper().attention_scale,
            sinks: None,
            bias: self.distance_bias(),
            prompt: self.is_prompt,
        }
    }

    pub fn attend(
        &self,
        view: &DeviceAttention,
        q: DeviceSlice,
        k: DeviceRows,
        v: DeviceRows,
        out: DeviceSlice,
    ) -> Result<()> {
        let work = self.slice(&self.layout().mixer.work);
        self.dev.ops.attention.launch(self.stream(), view, q, self.n, k, v, work, out)
    }

    /// See `Model::latent_attention`.
    fn latent_attention(&self, l: usize, w: &GpuLatent) -> Result<()> {
        let (hyper, m, ops, stream) =
            (self.hyper(), &self.layout().mixer, &self.dev.ops, self.stream());
        let (rank, n_rot, n) = (hyper.kv_rank, hyper.rope.n_rot, self.n);
        let (heads, nope, row) = (n * hyper.n_head, hyper.head_dim - n_rot, rank + n_rot);
        self.latent_products(w)?;
        let q = self.words(&m.q, heads * hyper.head_dim);
        let kv = self.words(&m.kv, n * row);
        self.rope(q, self.model.rope_shape(hyper.head_dim, nope))?;
        self.rope(kv, self.model.rope_shape(row, rank))?;
        // cache: the compressed part is normalised
        let compressed = self.words(&m.compressed, n * rank);
        let normed = Columns::new(compressed, rank, 0);
        ops.rows.copy_columns(stream, Columns::new(kv, row, 0), normed, rank, n)?;
        let norm = self.dev.weights.vector(&w.kv_a_norm);
        ops.norm.rms_norm_heads(stream, compressed, norm, hyper.norm_eps)?;
        ops.rows.copy_columns(stream, normed, Columns::new(kv, row, 0), rank, n)?;
        let (rows, _) = self.cache.of_slot(l);
        self.store(kv, rows)?;
        // queries into the compressed space
        let x = self.words(&m.nope, heads * nope);
        let of_q = |first: usize| Columns::new(q, hyper.head_dim, first);
        ops.rows.copy_columns(stream, of_q(0), Columns::new(x, nope, 0), nope, heads)?;
        let absorbed = self.words(&m.absorbed, heads * rank);
        self.head_products(&w.k_b, (heads, nope), x, absorbed)?;
        let k = self.words(&m.k, heads * row);
        let of_k = |first: usize| Columns::new(k, row, first);
        ops.rows.copy_columns(stream, Columns::new(absorbed, rank, 0), of_k(0), rank, heads)?;
        ops.rows.copy_columns(stream, of_q(nope), of_k(rank), n_rot, heads)?;
        // attention among compressed rows, then heads' values
        let view = DeviceAttention { n_head_kv: 1, ..self.view() };
        self.attend(&view, k, rows, rows.narrow(rank), absorbed)?;
        let attended = self.words(&m.attended, heads * hyper.head_dim_v);
        self.head_products(&w.v_b, (heads, rank), absorbed, attended)?;
        self.attention_output(&w.output)
    }

    /// h → q [tokens, n_head, head_dim] and kv [tokens, kv_rank + n_rot]
    fn latent_products(&self, w: &GpuLatent) -> Result<()> {
        let (hyper, m) = (self.hyper(), &self.layout().mixer);
        let q = self.words(&m.q, self.n * hyper.n_head * hyper.head_dim);
        let kv = self.words(&m.kv, self.n * (hyper.kv_rank + hyper.rope.n_rot));
        let first = match &w.query {
            GpuQuery::Direct(q) => q,
            GpuQuery::Compressed { a, .. } => a,
        };
        let acts = self.acts_of_h([first, &w.kv_a].map(|linear| linear.weight.ty))?;
        self.linear(&w.kv_a, &acts, kv)?;
        let GpuQuery::Compressed { a, norm, b } = &w.query else {
            return self.linear(first, &acts, q);
        };
        let compressed = self.words(&m.compressed, self.n * a.weight.rows);
        self.linear(a, &acts, compressed)?;
        let norm = self.dev.weights.vector(norm);
        self.dev.ops.norm.rms_norm_heads(self.stream(), compressed, norm, hyper.norm_eps)?;
        let acts = self.mixer_acts([b.weight.ty], (self.n, b.weight.cols), compressed)?;
        self.linear(b, &acts, q)
    }

    /// What attention gathered → y
    pub fn attention_output(&self, output: &GpuLinear) -> Result<()> {
        let width = output.weight.cols;
        let attended = self.words(&self.layout().mixer.attended, self.n * width);
        let acts = self.mixer_acts([output.weight.ty], (self.n, width), attended)?;
        self.linear(output, &acts, self.y())
    }
}
