//! Operations that layers with attention share: rotations, the cache, attention to a text, and the
//! projection of what it weighs.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::acts::DeviceActs;
use crate::backend::gpu::attention::{AttentionData, DeviceAttention};
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::matmul::is_few;
use crate::backend::gpu::matvec::ProductOut;
use crate::backend::gpu::rope::DeviceCosSin;
use crate::backend::ops::RopeShape;
use crate::forward::gpu::acts::{GpuActs, RowShape};
use crate::forward::gpu::bump::ByteRange;
use crate::forward::gpu::mixer::on_device;
use crate::forward::gpu::pass::{GpuPass, GpuSegment, Role};
use crate::forward::gpu::weights::GpuLinear;
use crate::model::weights::{Streams, SubLayer};

/// The memory of attention's result.
#[derive(Clone, Copy)]
pub struct Attended<'a> {
    /// f32 [rows, heads, dim], of all segments
    pub values: DeviceSlice<'a>,
    /// Records of the segment's rows, stored besides.
    pub records: Option<DeviceActs<'a>>,
}

impl<'a> GpuPass<'a> {
    /// The cosines and sines of a layer that slides or does not.
    pub fn rope_table(&self, slides: bool) -> DeviceCosSin<'a> {
        let (kept, hyper) = (self.kept(), self.hyper());
        match slides && self.model.sliding_frequencies.is_some() {
            true => self.cos_sin(&kept.sliding_cos_sin, hyper.sliding_rope.n_rot),
            false => self.cos_sin(&kept.cos_sin, hyper.rope.n_rot),
        }
    }

    /// The cosines and sines of the first positions of the rows' blocks.
    pub fn block_rope_table(&self) -> DeviceCosSin<'a> {
        self.cos_sin(&self.kept().means_cos_sin, self.hyper().rope.n_rot)
    }

    pub fn cos_sin(&self, range: &ByteRange, n_rot: usize) -> DeviceCosSin<'a> {
        let data = self.words(range, self.n() * n_rot);
        DeviceCosSin { data, n_pairs: n_rot / 2, back: false }
    }

    /// Multiplies queries by their positions' factors, if the model has a temperature.
    pub fn temper(&self, q: DeviceSlice) -> Result<()> {
        if self.hyper().temperature.is_none() {
            return Ok(());
        }
        let head_dim = self.hyper().head_dim;
        let table = self.cos_sin(&self.kept().temperature, head_dim);
        self.rope(q, self.model.rope_shape(head_dim, 0), table)
    }

    /// Rotates the heads of x by the rows' positions.
    pub fn rope(&self, x: DeviceSlice, shape: RopeShape, table: DeviceCosSin) -> Result<()> {
        let rows = self.words(&self.layout().iota, self.n());
        // SAFETY: `iota` counts from 0 to n - 1, and the table has a row for each token.
        unsafe { self.dev.ops.rope.launch(self.stream(), x, shape, table, rows) }
    }

    /// Stores a segment's rows of x in its cache, at the rows' positions.
    pub fn store(
        &self,
        segment: &GpuSegment<'a>,
        x: DeviceSlice<'a>,
        rows: DeviceRows,
    ) -> Result<()> {
        let x = segment.of(x, rows.heads * rows.dim);
        self.dev.ops.store.store(self.stream(), x, segment.n(), self.past(segment), rows)
    }

    /// u32 [1]: the position of a segment's first row
    pub fn past(&self, segment: &GpuSegment<'a>) -> DeviceSlice<'a> {
        segment.word(self.words(&self.kept().past, self.batch.n_segments()))
    }

    /// The view of queries on their own text: positions up to their own, or the whole of a source
    /// text and where the model fills in masked tokens.
    pub fn view(&self, segment: &GpuSegment<'a>) -> DeviceAttention<'a> {
        let sees_all = self.role == Role::Source || self.hyper().sees_all;
        DeviceAttention {
            n_head: self.hyper().n_head,
            n_head_kv: self.hyper().n_head_kv,
            past: self.past(segment),
            max_seen: self.max_seen(segment),
            // A decoded token is the last of its text.
            all: (sees_all && !self.is_decode()).then_some(segment.segment.past + segment.n()),
            window: None,
            chunk: None,
            scale: self.hyper().attention_scale,
            cap: None,
            sinks: None,
            bias: self.distance_bias(),
            prompt: segment.is_prompt() && !self.dev.is_exact,
            lists: 0,
        }
    }

    /// q → out, for a segment's rows over its keys and values
    pub fn attend(
        &self,
        segment: &GpuSegment<'a>,
        view: &DeviceAttention,
        q: DeviceSlice<'a>,
        rows: [DeviceRows; 2],
        out: DeviceSlice<'a>,
    ) -> Result<()> {
        let attended = Attended { values: out, records: None };
        self.attend_into(segment, view, q, rows, attended)
    }

    /// Attends into `attended`, and stores the segment's records if there are any.
    pub fn attend_into(
        &self,
        segment: &GpuSegment<'a>,
        view: &DeviceAttention,
        q: DeviceSlice<'a>,
        [k, v]: [DeviceRows; 2],
        attended: Attended<'a>,
    ) -> Result<()> {
        let work = self.slice(&self.layout().mixer.work);
        let q = segment.of(q, view.n_head * k.dim);
        let Attended { values, records } = attended;
        let out = segment.of(values, view.n_head * v.dim);
        let data = AttentionData { tokens: segment.n(), q, k, v, work, out, records };
        self.dev.ops.attention.launch(self.stream(), view, data)
    }

    /// The values that a mixer weighs → y, or added to x
    pub fn mixer_output(&self, l: usize, output: &GpuLinear) -> Result<()> {
        self.mixer_product(l, output, &self.attended_acts(output)?)
    }

    /// Projects values that are in the form that the projection reads.
    pub fn mixer_product(&self, l: usize, output: &GpuLinear, acts: &GpuActs) -> Result<()> {
        let Some(scale) = self.mixer_residual(l) else {
            return self.linear(output, acts, self.y());
        };
        let (data, stride) = (self.x(), output.weight.rows);
        self.product(output, acts, ProductOut { data, stride, scale: Some(scale) })
    }

    /// The factor of what the mixer of layer `l` adds to the residual stream, if its last
    /// projection adds it: for few rows, where nothing comes between.
    pub fn mixer_residual(&self, l: usize) -> Option<f32> {
        let (hyper, layer) = (self.hyper(), self.layer(l));
        let output = on_device(&layer.mixer)?.output()?;
        let is_one = matches!(layer.streams[SubLayer::Mixer as usize], Streams::One);
        let has_scale = output.scale != 1.0 || hyper.attention_output_scale != 1.0;
        let sees_before = layer.ffn.as_ref().is_some_and(|ffn| ffn.sees_before);
        let is_plain = is_one && layer.post_norm.is_none() && !has_scale && !sees_before;
        let is_few = is_few(&self.dev.weights.mat(&output.weight), self.n());
        let is_added = is_plain && is_few && !self.adds_to_normed();
        is_added.then_some(hyper.residual_scale).filter(|scale| *scale != 0.0)
    }

    /// The weighted values of all heads → y
    pub fn attention_output(&self, output: &GpuLinear) -> Result<()> {
        self.linear(output, &self.attended_acts(output)?, self.y())
    }

    fn attended_acts(&self, output: &GpuLinear) -> Result<GpuActs<'a>> {
        let (n, cols) = (self.n(), output.weight.cols);
        let attended = self.words(&self.layout().mixer.attended, n * cols);
        self.mixer_acts([output.weight.ty], RowShape { n, cols }, attended)
    }
}
