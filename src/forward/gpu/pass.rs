//! The state of one forward pass, and the small operations that its stages share.

use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::gpu::expert::DeviceForm;
use crate::backend::gpu::heads::DeviceHeadMats;
use crate::backend::gpu::matvec::{MAX_TOKENS, ProductOut};
use crate::backend::gpu::rows::Columns;
use crate::backend::gpu::{DeviceSlice, Stream};
use crate::experts::vram::VramTiers;
use crate::forward::gpu::acts::{GpuActs, HalfTypes, NormedRows, RowShape, note_half};
use crate::forward::gpu::cache::GpuCache;
use crate::forward::gpu::device_model::DeviceModel;
use crate::forward::gpu::devices::{DeviceRests, PassState};
use crate::forward::gpu::expert_parallel::peer::Peer;
use crate::forward::gpu::experts::{ExpertContext, device_form};
use crate::forward::gpu::layers::{GpuFfn, GpuLayer};
use crate::forward::gpu::pack::OnDevice;
use crate::forward::gpu::weights::{GpuHeads, GpuLinear};
use crate::forward::gpu::workspace::{ByteRange, KeptLayout, WorkspaceLayout};
use crate::forward::{Batch, Buffers, Outputs, Segment};
use crate::gguf::TensorType;
use crate::model::Model;
use crate::model::descriptor;
use crate::model::hyper::HyperParams;
use crate::model::kv::KvCache;
use crate::model::weights::{FfnWeights, Norm};
use crate::policy::Phase;
use std::ops::Range;

/// Positions that a graph is captured for at least.
const GRAPH_POSITIONS: usize = 512;

/// Which text of a request the rows of a pass are of, and so the layers that they go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The only text of a model without an encoder.
    Only,
    /// The source text, which the encoder reads.
    Source,
    /// The decoder's text, which answers a source text.
    Answer,
}

/// The KV caches of the sessions of a batch, indexed by `Segment::session`.
pub struct Caches<'a> {
    /// Caches of the layers on the CPU.
    pub host: &'a mut [&'a mut KvCache],
    /// Caches of the layers on the device.
    pub device: &'a [&'a GpuCache],
}

/// A segment of the batch on the device: one text's rows and its KV cache.
#[derive(Clone)]
pub struct GpuSegment<'a> {
    /// Index in the batch.
    pub index: usize,
    pub rows: Range<usize>,
    pub segment: &'a Segment,
    pub cache: &'a GpuCache,
}

impl<'a> GpuSegment<'a> {
    pub fn n(&self) -> usize {
        self.rows.len()
    }

    /// Whether the rows are part of a prompt, however it is divided into passes.
    pub fn is_prompt(&self) -> bool {
        self.segment.phase == Phase::Prompt
    }

    /// The rows behind the first `n`.
    pub fn from(&self, n: usize) -> GpuSegment<'a> {
        let rows = self.rows.end.min(self.rows.start + n)..self.rows.end;
        GpuSegment { rows, ..self.clone() }
    }

    /// The first `n` rows, or all if there are fewer.
    pub fn to(&self, n: usize) -> GpuSegment<'a> {
        let rows = self.rows.start..self.rows.end.min(self.rows.start + n);
        GpuSegment { rows, ..self.clone() }
    }

    /// The segment's rows of a buffer with `width` f32s or u32s for each row of the batch.
    pub fn of(&self, all: DeviceSlice<'a>, width: usize) -> DeviceSlice<'a> {
        all.slice(4 * self.rows.start * width..4 * self.rows.end * width)
    }

    /// The segment's word of a buffer with one for each segment.
    pub fn word(&self, all: DeviceSlice<'a>) -> DeviceSlice<'a> {
        all.slice(4 * self.index..4 * (self.index + 1))
    }
}

/// One forward pass: what it computes, what it reads, and everything that it may change.
pub struct GpuPass<'a> {
    pub batch: &'a Batch,
    pub role: Role,
    pub model: &'a Model,
    pub dev: &'a DeviceModel,
    pub cpu: &'a Cpu,
    pub caches: Caches<'a>,
    /// By session: KV caches of encoder layers on the CPU, for this pass only.
    pub encoder_caches: Vec<KvCache>,
    pub b: &'a mut Buffers,
    pub state: &'a mut PassState,
    pub outputs: &'a mut dyn Outputs,
    pub rests: &'a mut dyn DeviceRests,
    /// Whether the residual stream is on the device; in `b.x` if not.
    pub on_device: bool,
}

/// The number of positions that a step's operations are queued for when a text's rows see `n`: a
/// captured graph serves until the text is twice as long.
pub fn graph_positions(n: usize, n_ctx: usize) -> usize {
    n.next_power_of_two().max(GRAPH_POSITIONS).min(n_ctx)
}

impl<'a> GpuPass<'a> {
    /// The number of rows.
    pub fn n(&self) -> usize {
        self.batch.n_rows()
    }

    /// The segments, in the order of their rows.
    pub fn segments(&self) -> impl Iterator<Item = GpuSegment<'a>> + use<'a> {
        let (batch, caches) = (self.batch, self.caches.device);
        batch.segments().enumerate().map(|(index, (rows, segment))| GpuSegment {
            index,
            rows,
            segment,
            cache: caches[segment.session],
        })
    }

    /// Whether this is one decoded token.
    pub fn is_decode(&self) -> bool {
        self.n() == 1 && self.batch.decode_rows().len() == 1
    }

    /// Whether stages before the experts are captured graphs: those of one decoded token or of a
    /// few that see what is before them, all of it, between which no state is copied.
    pub fn is_captured(&self) -> bool {
        let is_few = self.batch.decode_rows().len() == self.n() && self.n() <= MAX_TOKENS;
        let sees_past = !self.hyper().sees_all && self.hyper().compressed.is_none();
        let is_step = is_few && sees_past && self.role == Role::Only;
        self.is_decode() || is_step && self.segments().all(|segment| !self.is_cut(&segment))
    }

    /// Whether a layer is queued while the one before it runs: for one row, and for a few that are
    /// decoded. Nothing waits for the stream of the layers before the experts.
    pub fn is_step(&self) -> bool {
        self.n() == 1 || self.is_captured()
    }

    /// Whether a copy of the states is wanted between the segment's rows.
    fn is_cut(&self, segment: &GpuSegment) -> bool {
        let host = &self.caches.host[segment.segment.session];
        host.n_to_mark(segment.segment.past) < segment.n()
    }

    /// The number of positions that a segment's rows see, or more.
    pub fn max_seen(&self, segment: &GpuSegment) -> usize {
        let end = segment.segment.past + segment.n();
        if self.is_captured() { graph_positions(end, segment.cache.n_ctx()) } else { end }
    }

    /// The number of tokens of a segment's source text.
    pub fn n_source(&self, segment: &GpuSegment) -> usize {
        self.caches.host[segment.segment.session].n_source()
    }

    /// The number of positions of the source text that a segment's rows see, or more.
    pub fn max_source(&self, segment: &GpuSegment) -> usize {
        match self.role {
            Role::Answer if self.is_decode() => {
                graph_positions(self.n_source(segment), segment.cache.n_ctx())
            }
            Role::Answer => self.n_source(segment),
            Role::Only | Role::Source => 0,
        }
    }

    /// The layers that this pass goes through.
    pub fn layers(&self) -> Range<usize> {
        match self.role {
            Role::Source => 0..self.hyper().n_encoder_layers(),
            Role::Only | Role::Answer => self.hyper().decoder_layers(),
        }
    }

    pub fn hyper(&self) -> &'a HyperParams {
        &self.model.hyper
    }

    pub fn stream(&self) -> &'a Stream {
        &self.dev.stream
    }

    pub fn layout(&self) -> &'a WorkspaceLayout {
        &self.dev.layout
    }

    /// The buffers that this pass keeps from layer to layer. Those of steps are in graphs.
    pub fn kept(&self) -> &'a KeptLayout {
        let is_step = self.n() == 1 || self.batch.decode_rows().len() == self.n();
        &self.layout().kept[usize::from(is_step)]
    }

    /// A layer on the device.
    pub fn layer(&self, l: usize) -> &'a GpuLayer {
        self.dev.layers[l].as_ref().expect("a layer on the device")
    }

    /// The feed-forward part of a layer that has one.
    pub fn ffn(&self, l: usize) -> &'a GpuFfn {
        self.layer(l).ffn.as_ref().expect("a layer with a feed-forward part")
    }

    /// The feed-forward part as the file has it, of a layer that has one.
    pub fn ffn_weights(&self, l: usize) -> &'a FfnWeights {
        self.model.weights.layers[l].ffn.as_ref().expect("a layer with a feed-forward part")
    }

    /// The VRAM tiers, if they may hold experts of this layer.
    pub fn tiers(&self, l: usize) -> Option<&'a VramTiers> {
        self.dev.tiers.as_deref().filter(|tiers| tiers.has(l))
    }

    pub fn slice(&self, range: &ByteRange) -> DeviceSlice<'a> {
        self.dev.workspace.slice(range)
    }

    /// The first `n` f32s or u32s of a range.
    pub fn words(&self, range: &ByteRange, n: usize) -> DeviceSlice<'a> {
        self.dev.workspace.words(range, n)
    }

    /// The residual stream: f32 [rows, n_embd], as the next three.
    pub fn x(&self) -> DeviceSlice<'a> {
        self.stream_rows(&self.kept().x)
    }

    /// The residual stream before attention.
    pub fn before(&self) -> DeviceSlice<'a> {
        self.stream_rows(&self.layout().before)
    }

    /// The normalised output of a dense branch, until the experts' sum joins it. No layer needs
    /// the stream before attention as well.
    pub fn branch(&self) -> DeviceSlice<'a> {
        self.before()
    }

    /// The normalised input of the next stage.
    pub fn h(&self) -> DeviceSlice<'a> {
        self.stream_rows(&self.layout().h)
    }

    /// The part that a stage adds to the residual stream.
    pub fn y(&self) -> DeviceSlice<'a> {
        self.stream_rows(&self.layout().y)
    }

    fn stream_rows(&self, range: &ByteRange) -> DeviceSlice<'a> {
        self.words(range, self.n() * self.hyper().n_embd)
    }

    /// x → out, row by row
    pub fn norm(&self, norm: &Norm<OnDevice>, x: DeviceSlice, out: DeviceSlice) -> Result<()> {
        let (ops, eps) = (&self.dev.ops.norm, norm.eps);
        let weight = self.dev.weights.vector(&norm.weight);
        match norm.kind {
            descriptor::Norm::Rms => ops.rms_norm_rows(self.stream(), x, weight, eps, out),
            descriptor::Norm::GroupedRms => {
                let n_groups = self.hyper().norm_groups;
                ops.rms_norm_groups_into(self.stream(), x, weight, n_groups, eps, out)
            }
            descriptor::Norm::Layer => {
                let bias = self.dev.weights.vector(&norm.bias);
                ops.layer_norm_rows(self.stream(), x, weight, bias, eps, out)
            }
            descriptor::Norm::ScaledRms => unreachable!("a layer without kernels is on the CPU"),
            descriptor::Norm::None => self.stream().copy(out, x),
        }
    }

    /// Whether parts add to the normalised stream that they read.
    pub fn adds_to_normed(&self) -> bool {
        self.model.descriptor.parts.residual == descriptor::Residual::Normed
    }

    /// x += norm(scale · y); y and h are overwritten if there is a norm. Or x = h + y, if the
    /// architecture adds so.
    pub fn add_residual(&self, norm: Option<&Norm<OnDevice>>, scale: f32) -> Result<()> {
        let (ops, residual_scale) = (&self.dev.ops, self.hyper().residual_scale);
        if self.adds_to_normed() {
            let (stream, x) = (self.stream(), self.x());
            return ops.norm.add_normed(stream, residual_scale, self.h(), self.y(), x);
        }
        let Some(norm) = norm else {
            let scale = scale * residual_scale;
            return ops.norm.add_scaled(self.stream(), self.x(), scale, self.y());
        };
        if scale != 1.0 {
            ops.rows.scale(self.stream(), self.y(), scale)?;
        }
        self.norm(norm, self.y(), self.h())?;
        ops.norm.add_scaled(self.stream(), self.x(), residual_scale, self.h())
    }

    /// Stores h in the forms that matrices of `types` read.
    pub fn acts_of_h(&self, types: impl IntoIterator<Item = TensorType>) -> Result<GpuActs<'a>> {
        self.acts_of(types, self.n(), self.h())
    }

    /// x → h, row by row, in the forms that matrices of `types` read
    pub fn normed_acts(
        &self,
        norm: &Norm<OnDevice>,
        x: DeviceSlice<'a>,
        types: impl IntoIterator<Item = TensorType>,
    ) -> Result<GpuActs<'a>> {
        if norm.kind != descriptor::Norm::Rms {
            self.norm(norm, x, self.h())?;
            return self.acts_of_h(types);
        }
        let (weight, eps) = (self.dev.weights.vector(&norm.weight), norm.eps);
        let normed = NormedRows { shape: self.embd_rows(self.n()), x, weight, eps, h: self.h() };
        let memory = self.slice(&self.layout().acts);
        GpuActs::fill_normed(&self.dev.ops, self.stream(), types, normed, memory)
    }

    /// The normalised input of layer `l`'s mixer in the forms that matrices of `types` read.
    pub fn mixer_input(
        &self,
        l: usize,
        types: impl IntoIterator<Item = TensorType>,
    ) -> Result<GpuActs<'a>> {
        let mut halves = HalfTypes::default();
        let types = types.into_iter().inspect(|ty| note_half(&mut halves, *ty));
        let acts = self.normed_acts(&self.layer(l).norm, self.x(), types)?;
        self.with_halves(acts, halves, self.h(), self.slice(&self.layout().acts))
    }

    /// Stores the first `n` rows, which are in `h`, in the forms that matrices of `types` read.
    pub fn acts_of(
        &self,
        types: impl IntoIterator<Item = TensorType>,
        n: usize,
        h: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let (shape, memory) = (self.embd_rows(n), self.slice(&self.layout().acts));
        GpuActs::fill(&self.dev.ops, self.stream(), types, shape, h, memory)
    }

    /// The input of a layer's experts: h, or rows of their own that are made of it, f32 [rows,
    /// width].
    pub fn expert_input(&self, l: usize) -> DeviceSlice<'a> {
        if !self.ffn_weights(l).has_own_input() {
            return self.h();
        }
        let RowShape { n, cols } = self.input_rows(l);
        self.words(&self.layout().ffn.latent, n * cols)
    }

    /// The shape of the input of a layer's experts.
    pub fn input_rows(&self, l: usize) -> RowShape {
        let w = self.ffn_weights(l);
        RowShape { n: w.n_inputs(self.n(), self.hyper().routing.k), cols: w.expert.n_embd }
    }

    pub fn embd_rows(&self, n: usize) -> RowShape {
        RowShape { n, cols: self.hyper().n_embd }
    }

    /// Stores another input of the attention part in the forms that matrices of `types` read.
    pub fn mixer_acts(
        &self,
        types: impl IntoIterator<Item = TensorType>,
        shape: RowShape,
        x: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        let memory = self.slice(&self.layout().mixer.acts);
        let mut halves = HalfTypes::default();
        let types = types.into_iter().inspect(|ty| note_half(&mut halves, *ty));
        let acts = GpuActs::fill(&self.dev.ops, self.stream(), types, shape, x, memory)?;
        self.with_halves(acts, halves, x, memory)
    }

    /// Whether tensor cores multiply this pass's halves: only if all rows are of prompts. The bits
    /// of a decoded row do not depend on those beside it.
    pub fn rounds_to_halves(&self) -> bool {
        let is_prompt = self.role == Role::Only && self.batch.decode_rows().is_empty();
        is_prompt && !self.dev.is_exact
    }

    /// Adds the activations rounded to `types`, if the pass's halves are multiplied so.
    pub fn with_halves(
        &self,
        acts: GpuActs<'a>,
        types: HalfTypes,
        x: DeviceSlice<'a>,
        memory: DeviceSlice<'a>,
    ) -> Result<GpuActs<'a>> {
        match self.rounds_to_halves() {
            true => acts.with_halves(&self.dev.ops, self.stream(), types, x, memory),
            false => Ok(acts),
        }
    }

    /// out [rows, weight.rows] = weight · acts + bias
    pub fn linear(&self, linear: &GpuLinear, acts: &GpuActs, out: DeviceSlice) -> Result<()> {
        let out_rows = ProductOut { data: out, stride: linear.weight.rows, scale: None };
        self.product(linear, acts, out_rows)?;
        match linear.scale {
            1.0 => Ok(()),
            scale => self.dev.ops.rows.scale(self.stream(), out, scale),
        }
    }

    /// out = linear · acts, in columns of wider rows; `free` has room for the product.
    pub fn linear_columns(
        &self,
        linear: &GpuLinear,
        acts: &GpuActs,
        out: Columns,
        free: DeviceSlice,
    ) -> Result<()> {
        if linear.scale != 1.0 {
            let (n, rows) = (self.n(), linear.weight.rows);
            let product = free.slice(0..4 * n * rows);
            self.linear(linear, acts, product)?;
            let product = Columns::new(product, rows, 0);
            return self.dev.ops.rows.copy_columns(self.stream(), product, out, rows, n);
        }
        let Columns { data, stride, first } = out;
        let data = data.slice(4 * first..data.len());
        self.product(linear, acts, ProductOut { data, stride, scale: None })
    }

    /// The product of a matrix with its bias, without its scale.
    pub fn product(&self, linear: &GpuLinear, acts: &GpuActs, out: ProductOut) -> Result<()> {
        let (ops, stream) = (&self.dev.ops, self.stream());
        let (mat, bias) = (self.dev.weights.mat(&linear.weight), self.dev.weights.bias(linear));
        if let Some(halves) = acts.halves(mat.ty) {
            return ops.halves.product(stream, mat, halves, bias, out);
        }
        let (products, x, ProductOut { data, stride, scale }) =
            (&ops.products, acts.view(mat.ty), out);
        match scale {
            None => products.product(stream, mat, x, bias, data, stride),
            Some(scale) => products.add_product(stream, mat, x, bias, scale, data),
        }
    }

    /// A product for each head: x [rows · heads, cols] → out [rows · heads, heads.rows].
    pub fn head_products(
        &self,
        heads: &GpuHeads,
        shape: RowShape,
        x: DeviceSlice<'a>,
        out: DeviceSlice,
    ) -> Result<()> {
        let all = self.dev.weights.mat(&heads.all);
        let (ops, stream, memory) =
            (&self.dev.ops, self.stream(), self.slice(&self.layout().mixer.acts));
        let acts = GpuActs::fill(ops, stream, [all.ty], shape, x, memory)?.view(all.ty);
        let GpuHeads { n_heads, rows, first, step, .. } = *heads;
        let mats = DeviceHeadMats { all, n_heads, rows, first, step };
        ops.heads.launch(stream, mats, acts, out)
    }

    /// The context of the first device's experts on the stream of the layers.
    pub fn expert_context(&self) -> ExpertContext<'a> {
        ExpertContext {
            ops: &self.dev.ops,
            stream: self.stream(),
            workspace: &self.dev.workspace,
            layout: &self.layout().ffn.experts,
        }
    }

    /// Biases and factors of a layer's routed experts on the first device.
    pub fn expert_form(&self, l: usize) -> DeviceForm<'a> {
        device_form(&self.dev.weights, &self.ffn(l).form)
    }

    /// Whether a recorder takes the routing of some rows.
    pub fn is_recorded(&mut self) -> bool {
        let mut segments = self.batch.segments();
        segments.any(|(_, segment)| self.outputs.recorder(segment.session).is_some())
    }

    /// Waits for all peers. Their results may be read only after this: it fails if one was lost.
    pub fn wait_for_peers(&mut self) -> Result<()> {
        // Waits for each of them, even if one has failed.
        self.state.peers.iter_mut().map(Peer::wait).fold(Ok(()), Result::and)
    }
}

#[cfg(test)]
mod tests {
    use super::graph_positions;

    #[test]
    fn a_graph_serves_a_text_that_grows() {
        assert_eq!([1, 512, 513, 1025].map(|n| graph_positions(n, 1500)), [512, 512, 1024, 1500]);
        assert_eq!(graph_positions(3, 32), 32);
    }
}
