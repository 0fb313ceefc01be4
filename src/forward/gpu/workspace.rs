//! The buffers of a forward pass on a device: byte ranges in one allocation, made at load for the
//! largest micro-batch. A pass allocates nothing, and addresses in captured graphs stay valid.

use crate::Result;
use crate::backend::gpu::matmul::{TILE_TOKENS, TILE_WORDS, max_tiles};
use crate::backend::gpu::matvec::MAX_TOKENS;
use crate::backend::gpu::sample::{self, TOP_K_MAX};
use crate::backend::gpu::{Device, DeviceBuffer, DeviceSlice, Stream};
use crate::backend::ops::ExpertShape;
use crate::backend::ops::Route;
use crate::experts::vram::GranuleLayout;
use crate::forward::gpu::acts::acts_bytes;
pub use crate::forward::gpu::bump::{BumpLayout, ByteRange};
use crate::forward::gpu::compressed_layers::CompressedLayout;
use crate::forward::gpu::expander::n_ids;
use crate::forward::gpu::index_layers::{IndexLayout, ListsLayout};
use crate::forward::gpu::mixer_layout::{MixerLayout, MixerSizes};
use crate::forward::gpu::upload::{floats, integers, starts};
use crate::forward::logits::LOGITS_ROWS;
use crate::model::hyper::HyperParams;
use crate::model::weights::{Streams, Weights};
use std::ops::Range;

/// The ranges of the buffers in the allocation. Buffers are f32 with a row for each token unless
/// said; shapes are those of the CPU's `Buffers`.
#[derive(Clone, Default)]
pub struct WorkspaceLayout {
    /// For passes with prompts, and for steps of decode, which run while one of those rests.
    pub kept: [KeptLayout; 2],
    pub before: ByteRange,
    pub h: ByteRange,
    pub y: ByteRange,
    pub acts: ByteRange,
    pub streams: StreamLayout,
    pub ngrams: NgramLayout,
    pub mixer: MixerLayout,
    pub compressed: CompressedLayout,
    pub index: IndexLayout,
    pub ffn: FfnLayout,
    pub logits: ByteRange,
    /// Scratch memory for choosing the best logits, and the result: f32 [k], then u32 [k].
    pub top_k: ByteRange,
    pub best: ByteRange,
    /// u32 [tokens, or more that a matrix of latent attention has rows]: 0, 1, …
    pub iota: ByteRange,
    /// u32 [tokens]
    pub zeros: ByteRange,
    /// f32 [tokens], or the elements of all residual streams if they are more
    pub ones: ByteRange,
    /// Keys and values of the encoder's layer that is being computed, f32 or smaller.
    pub encoder: [ByteRange; 2],
    n_bytes: usize,
}

/// The buffers whose contents a pass keeps from layer to layer.
#[derive(Clone, Default)]
pub struct KeptLayout {
    pub x: ByteRange,
    /// The residual streams, if there are several, f32 [tokens, streams, n_embd], or
    /// [streams, tokens, n_embd] of those that layers leave behind
    pub streams: ByteRange,
    /// Rows of the n-grams' table, f32 [tokens, n_embd], and the tokens' ids plus 1, f32 [tokens]
    pub ngrams: ByteRange,
    pub ids: ByteRange,
    /// u32 [tokens]: ids, if routers read them
    pub tokens: ByteRange,
    /// f32 [tokens, n_rot / 2, 2]: cosines and sines of the rows' positions
    pub cos_sin: ByteRange,
    /// `cos_sin` of sliding layers, if they turn otherwise
    pub sliding_cos_sin: ByteRange,
    /// `cos_sin` of the first positions of the rows' blocks, if an indexer has means of blocks
    pub means_cos_sin: ByteRange,
    /// f32 [tokens, head_dim / 2, 2]: factors on queries, and zeros
    pub temperature: ByteRange,
    /// u32 [segments]: position of the first row
    pub past: ByteRange,
    /// By ratio of compressed rows: u32 [segments], the first block that a text's rows complete,
    /// and f32 [tokens, n_rot / 2, 2], cosines and sines of the positions at which blocks begin
    pub blocks: [ByteRange; 2],
    pub block_cos_sin: [ByteRange; 2],
    /// u32 [1]: the last position of the source text
    pub source: ByteRange,
    /// f32 [layers, tokens, layer_input]: the layers' own inputs
    pub inputs: ByteRange,
    /// The positions that an indexer has chosen
    pub lists: ListsLayout,
}

/// Buffers of a part that reads and feeds several streams; see `WorkspaceLayout`.
#[derive(Clone, Default)]
pub struct StreamLayout {
    /// f32 [tokens, n, n_embd] each
    pub normed: ByteRange,
    pub gates: ByteRange,
    pub acts: ByteRange,
    /// f32 [tokens, mixes] each; scores of streams that were left behind are `weights`, too.
    pub mixes: ByteRange,
    pub weights: ByteRange,
    /// The numbers that gates are made of.
    pub low: ByteRange,
    pub low_acts: ByteRange,
}

/// Streams of a token that a pass keeps from layer to layer, besides x.
pub fn n_streams(hyper: &HyperParams) -> usize {
    match hyper.streams {
        Some(params) => params.n,
        None => n_left(hyper, hyper.n_layers).map_or(0, |n| n + 1),
    }
}

/// Streams that layers before layer `l` have left behind; `None` in models whose layers leave none.
pub fn n_left(hyper: &HyperParams, l: usize) -> Option<usize> {
    (hyper.kept_every > 0).then(|| l.div_ceil(hyper.kept_every))
}

impl StreamLayout {
    /// For micro-batches of up to `n` tokens.
    pub fn new(
        hyper: &HyperParams,
        weights: &Weights,
        n: usize,
        bump: &mut BumpLayout,
    ) -> StreamLayout {
        let (mut n_normed, mut n_gates, mut n_mixes, mut rank) = (0, 0, 0, 0);
        let of_layers = weights.layers.iter().flat_map(|layer| &layer.streams);
        for streams in of_layers.chain([&weights.last_streams]) {
            match streams {
                Streams::One | Streams::Averaged { .. } | Streams::Weighed { .. } => {}
                Streams::Hyper(connection) => {
                    n_normed = connection.params.n;
                    n_mixes = n_mixes.max(connection.mixes.weight.rows);
                }
                Streams::Gated(connection) => {
                    (n_normed, n_gates) = (connection.n, connection.n);
                    n_mixes = n_mixes.max(connection.n);
                    rank = rank.max(connection.down.weight.rows);
                }
                Streams::Mean | Streams::Lagging => {}
                Streams::Kept(_) => n_mixes = n_mixes.max(n_streams(hyper)),
            }
        }
        let acts = |cols: usize| if cols > 0 { acts_bytes(n, cols) } else { 0 };
        StreamLayout {
            normed: bump.words(n * n_normed * hyper.n_embd),
            gates: bump.words(n * n_gates * hyper.n_embd),
            acts: bump.bytes(acts(n_normed * hyper.n_embd)),
            mixes: bump.words(n * n_mixes),
            weights: bump.words(n * n_mixes),
            low: bump.words(n * rank),
            low_acts: bump.bytes(acts(rank)),
        }
    }
}

/// Buffers of the layer with n-grams: f32 [tokens, n, n_embd], but for the value.
#[derive(Clone, Default)]
pub struct NgramLayout {
    pub value: ByteRange,
    pub key: ByteRange,
    pub query: ByteRange,
    pub normed: ByteRange,
    pub convolved: ByteRange,
}

impl NgramLayout {
    /// For micro-batches of up to `n` tokens.
    pub fn new(hyper: &HyperParams, n: usize, bump: &mut BumpLayout) -> NgramLayout {
        let Some(params) = hyper.ngrams.first() else { return NgramLayout::default() };
        let mut wide = || bump.words(n * params.channels);
        let [key, query, normed, convolved] = std::array::from_fn(|_| wide());
        NgramLayout { value: bump.words(n * hyper.n_embd), key, query, normed, convolved }
    }
}

#[derive(Clone, Default)]
pub struct FfnLayout {
    /// The output of a layer's router in one piece, for the host to download: see `RouteParts`.
    pub route: ByteRange,
    /// f32 [tokens, experts a token] of experts that are always there: one, or those behind the
    /// routed ones
    pub only_gate: ByteRange,
    /// The input of experts, if it is not h, and then the sums of narrow ones.
    pub latent: ByteRange,
    pub latent_acts: ByteRange,
    /// u32 [tokens, k]: the row of `partial` that each pair's sum is in
    pub pair_rows: ByteRange,
    pub experts: ExpertLayout,
    /// For the look-up of the decode pipeline.
    pub lookup: LookupLayout,
    /// For experts that a look-up missed. Their sums go to the same `partial`.
    pub miss: ExpertLayout,
    /// The device of each expert of a step's rows, u32 [pairs], and the sums that come from peers,
    /// f32 [peers, pairs, n_embd].
    pub homes: ByteRange,
    pub rows: ByteRange,
}

/// Buffers for computing experts, for all pairs at once.
#[derive(Clone, Default)]
pub struct ExpertLayout {
    /// f32 [pairs, n_ff] each
    pub gate: ByteRange,
    pub up: ByteRange,
    pub inner: ByteRange,
    pub inner_acts: ByteRange,
    /// f32 [pairs, n_embd]
    pub partial: ByteRange,
    /// u64 [pairs or experts, granules]; of experts that a look-up missed three tables, since
    /// those that are read in place have one for each part of a granule.
    pub granules: ByteRange,
    /// u32 [tiles, `TILE_WORDS`] of grouped pairs, by `tile_kind`
    pub tiles: [ByteRange; 2],
    /// u32 [experts + 1]
    pub starts: ByteRange,
    /// u32 [pairs]
    pub tokens: ByteRange,
    /// u32 [pairs or experts]
    pub experts: ByteRange,
}

/// u32 [1] each, except the tables.
#[derive(Clone, Default)]
pub struct LookupLayout {
    /// u64 [layers, experts, granules]
    pub tables: ByteRange,
    /// On peers only: the first device has it among `RouteParts`, and the other two in mapped
    /// memory of the host.
    pub missing: ByteRange,
    pub pass: ByteRange,
    pub go: ByteRange,
}

/// The parts of `FfnLayout::route`: u32 [1], the pairs whose experts a look-up missed; u32
/// [rows, k], the chosen experts; f32 [rows, k], their weights; f32 [rows, experts], all
/// probabilities. Each begins at a cache line of its own.
#[derive(Clone, Copy)]
pub struct RouteParts {
    k: usize,
    n_experts: usize,
    sizes: [usize; 4],
}

impl RouteParts {
    pub fn new(n: usize, k: usize, n_experts: usize) -> RouteParts {
        RouteParts { k, n_experts, sizes: [4, 4 * n * k, 4 * n * k, 4 * n * n_experts] }
    }

    pub fn ranges(self) -> [Range<usize>; 4] {
        let mut starts = starts(&self.sizes);
        self.sizes.map(|size| {
            let start = starts.next().expect("one for each");
            start..start + size
        })
    }

    pub fn n_bytes(self) -> usize {
        self.ranges()[3].end
    }

    /// Reads a route out of its downloaded bytes.
    pub fn read(self, bytes: &[u8], route: &mut Route) {
        let [_, chosen, weights, probs] = self.ranges();
        (route.k, route.n_experts) = (self.k, self.n_experts);
        integers(&bytes[chosen], &mut route.chosen);
        floats(&bytes[weights], &mut route.weights);
        floats(&bytes[probs], &mut route.probs);
    }

    /// The number of pairs whose experts the look-up missed.
    pub fn n_missing(self, bytes: &[u8]) -> u32 {
        let [missing, ..] = self.ranges();
        u32::from_le_bytes(bytes[missing].try_into().expect("one word"))
    }
}

impl WorkspaceLayout {
    /// For micro-batches of up to `n` tokens in contexts of `n_ctx`, with `n_peers` further
    /// devices.
    pub fn new(
        hyper: &HyperParams,
        weights: &Weights,
        n: usize,
        n_ctx: usize,
        n_peers: usize,
    ) -> WorkspaceLayout {
        let mut bump = BumpLayout::default();
        let row = n * hyper.n_embd;
        let n_vocab = weights.output.weight.rows;
        let n_blocks = hyper.compressed.as_ref().map_or(0, |_| n);
        let mut kept = || KeptLayout {
            x: bump.words(row),
            streams: bump.words(n_streams(hyper) * row),
            ngrams: bump.words(hyper.ngrams.first().map_or(0, |_| row)),
            ids: bump.words(hyper.ngrams.first().map_or(0, |_| n)),
            tokens: bump.words(if weights.routes_by_id() { n } else { 0 }),
            cos_sin: bump.words(n * hyper.rope.n_rot),
            sliding_cos_sin: bump.words(match hyper.sliding_rope == hyper.rope {
                true => 0,
                false => n * hyper.sliding_rope.n_rot,
            }),
            means_cos_sin: bump.words(hyper.means_block().map_or(0, |_| n * hyper.rope.n_rot)),
            temperature: bump.words(n * hyper.temperature_width()),
            past: bump.words(n),
            blocks: [n_blocks; 2].map(|n| bump.words(n)),
            block_cos_sin: [n_blocks; 2].map(|n| bump.words(n * hyper.rope.n_rot)),
            source: bump.words(1),
            inputs: bump.words(n * hyper.n_layers * hyper.layer_input),
            lists: ListsLayout::new(hyper, n, n_ctx, &mut bump),
        };
        let mut layout = WorkspaceLayout {
            kept: [kept(), kept()],
            before: bump.words(row),
            h: bump.words(row),
            y: bump.words(row),
            acts: bump.bytes(acts_bytes(n, hyper.n_embd)),
            streams: StreamLayout::new(hyper, weights, n, &mut bump),
            ngrams: NgramLayout::new(hyper, n, &mut bump),
            mixer: MixerSizes::of(hyper, weights, n, n_ctx).layout(&mut bump),
            compressed: CompressedLayout::new(weights, hyper, n, n_ctx, &mut bump),
            index: IndexLayout::new(hyper, n, n_ctx, &mut bump),
            ffn: FfnLayout::new(hyper, weights, n, n_peers, &mut bump),
            logits: bump.words(LOGITS_ROWS.min(n) * n_vocab),
            top_k: bump.bytes(sample::scratch_bytes(n_vocab, 1, TOP_K_MAX)),
            best: bump.words(2 * TOP_K_MAX),
            iota: bump.words(n.max(n_ids(weights))),
            zeros: bump.words(n),
            ones: bump.words(n.max(n_streams(hyper) * hyper.n_embd)),
            encoder: encoder_rows(hyper, n_ctx).map(|n| bump.words(n)),
            n_bytes: 0,
        };
        layout.n_bytes = bump.n_bytes();
        layout
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }
}

/// The numbers of elements of an encoder layer's keys and values.
fn encoder_rows(hyper: &HyperParams, n_ctx: usize) -> [usize; 2] {
    let n = if hyper.encoder.is_some() { n_ctx * hyper.n_head_kv } else { 0 };
    [n * hyper.head_dim, n * hyper.head_dim_v]
}

impl FfnLayout {
    fn new(
        hyper: &HyperParams,
        weights: &Weights,
        n: usize,
        n_peers: usize,
        bump: &mut BumpLayout,
    ) -> FfnLayout {
        let routing = &hyper.routing;
        let k = routing.k.max(1);
        let n_experts = routing.n_experts.max(1);
        let mut sizes = ExpertSizes::default();
        sizes.raise_to_routed_max(weights, n * k);
        // Of a step.
        let n_pairs = n.min(MAX_TOKENS) * k;
        let miss = ExpertSizes::routed(weights, n_pairs);
        let width = expert_width(hyper, weights);
        let own = weights.layers.iter().filter_map(|layer| layer.ffn.as_ref());
        let own = own.filter(|ffn| ffn.has_own_input());
        let own = own.map(|ffn| (ffn.n_inputs(n, k), ffn.expert.n_embd));
        let latent_acts = own.clone().map(|(rows, cols)| acts_bytes(rows, cols)).max();
        let latent = own.map(|(rows, cols)| rows * cols).max().unwrap_or(0);
        sizes.raise_to_only_max(weights, n);
        let n_only = routing.adjugate.as_ref().map_or(1, |adjugate| adjugate.k.max(1));
        let route = bump.bytes(RouteParts::new(n, k, n_experts).n_bytes());
        let experts = ExpertLayout::new(&sizes, n * k, width, bump);
        let miss = ExpertLayout {
            inner: bump.words(miss.inner),
            inner_acts: bump.bytes(miss.inner_acts),
            granules: bump.bytes(3 * 8 * n_pairs * miss.n_granules),
            partial: experts.partial.clone(),
            ..ExpertLayout::default()
        };
        FfnLayout {
            route,
            only_gate: bump.words(n * n_only),
            latent: bump.words(latent),
            latent_acts: bump.bytes(latent_acts.unwrap_or(0)),
            pair_rows: bump.words(n * k),
            experts,
            lookup: LookupLayout::new(weights, n_experts, weights.layers.len(), bump),
            miss,
            homes: bump.words(n_peers.min(1) * n_pairs),
            rows: bump.words(n_peers * n_pairs * width),
        }
    }
}

/// Elements of the widest input of experts.
pub fn expert_width(hyper: &HyperParams, weights: &Weights) -> usize {
    let widths = weights.layers.iter().filter_map(|layer| Some(layer.ffn.as_ref()?.expert.n_embd));
    widths.chain([hyper.n_embd]).max().unwrap_or(0)
}

/// Elements of the largest input of a layer's experts, for `n` tokens with `k` experts each.
pub fn n_input_floats(weights: &Weights, n: usize, k: usize) -> usize {
    let inputs = weights.layers.iter().filter_map(|layer| layer.ffn.as_ref());
    inputs.map(|ffn| ffn.n_inputs(n, k) * ffn.expert.n_embd).max().unwrap_or(0)
}

/// The largest sizes that the experts of any layer need: numbers of values, or bytes where said.
#[derive(Clone, Copy, Default)]
pub struct ExpertSizes {
    inner: usize,
    /// In bytes.
    inner_acts: usize,
    /// Entries of a table of addresses.
    granules: usize,
    n_experts: usize,
    n_granules: usize,
}

impl ExpertSizes {
    /// For this many pairs of routed experts.
    pub fn routed(weights: &Weights, pairs: usize) -> ExpertSizes {
        let mut sizes = ExpertSizes::default();
        sizes.raise_to_routed_max(weights, pairs);
        sizes
    }

    fn raise_to_routed_max(&mut self, weights: &Weights, pairs: usize) {
        for (layer, experts) in weights.layers.iter().zip(&weights.routed) {
            if let (Some(experts), Some(ffn)) = (experts, &layer.ffn) {
                let layout = GranuleLayout::new(experts);
                self.raise_to_max(&ffn.expert, layout, pairs, experts.n_experts);
            }
        }
    }

    /// For experts that each of `n` tokens goes to, and those behind the routed ones.
    fn raise_to_only_max(&mut self, weights: &Weights, n: usize) {
        for (l, layer) in weights.layers.iter().enumerate() {
            let Some(ffn) = &layer.ffn else { continue };
            if let (Some(adjugate), Some(experts)) = (&ffn.adjugate, &weights.dense[l]) {
                let (pairs, layout) = (n * adjugate.k, GranuleLayout::new(experts));
                self.raise_to_max(&adjugate.shape, layout, pairs, experts.n_experts);
            } else if let Some(dense) = &weights.dense[l] {
                let shape = ffn.branch.as_ref().map_or(&ffn.expert, |branch| &branch.shape);
                self.raise_to_max(shape, GranuleLayout::new(dense), n, 1);
            }
            if let (Some(shared), Some(experts)) = (&ffn.shared, &weights.shared[l]) {
                self.raise_to_max(&shared.shape, GranuleLayout::new(experts), n, 1);
            }
        }
    }

    fn raise_to_max(
        &mut self,
        shape: &ExpertShape,
        layout: GranuleLayout,
        pairs: usize,
        experts: usize,
    ) {
        self.inner = self.inner.max(pairs * shape.n_ff);
        self.inner_acts = self.inner_acts.max(acts_bytes(pairs, shape.n_ff));
        self.granules = self.granules.max(layout.n_granules * pairs.max(experts));
        self.n_experts = self.n_experts.max(experts);
        self.n_granules = self.n_granules.max(layout.n_granules);
    }
}

impl ExpertLayout {
    pub fn new(
        sizes: &ExpertSizes,
        pairs: usize,
        width: usize,
        bump: &mut BumpLayout,
    ) -> ExpertLayout {
        let n_experts = sizes.n_experts.max(1);
        ExpertLayout {
            gate: bump.words(sizes.inner),
            up: bump.words(sizes.inner),
            inner: bump.words(sizes.inner),
            inner_acts: bump.bytes(sizes.inner_acts),
            partial: bump.words(pairs * width),
            granules: bump.bytes(8 * sizes.granules),
            tiles: TILE_TOKENS.map(|n| bump.words(TILE_WORDS * max_tiles(pairs, n_experts, n))),
            starts: bump.words(n_experts + 1),
            tokens: bump.words(pairs),
            experts: bump.words(pairs.max(n_experts)),
        }
    }
}

impl LookupLayout {
    pub fn new(
        weights: &Weights,
        n_experts: usize,
        n_tables: usize,
        bump: &mut BumpLayout,
    ) -> LookupLayout {
        let n_granules = ExpertSizes::routed(weights, 1).n_granules;
        LookupLayout {
            tables: bump.bytes(8 * n_tables * n_experts * n_granules),
            missing: bump.words(1),
            pass: bump.words(1),
            go: bump.words(1),
        }
    }
}

const WHAT: &str = "room for a micro-batch";

/// The allocation.
pub struct Workspace {
    buffer: DeviceBuffer,
}

impl Workspace {
    /// Allocates `n_bytes`, uninitialised.
    pub fn of(gpu: &Device, n_bytes: usize) -> Result<Workspace> {
        Ok(Workspace { buffer: DeviceBuffer::of(gpu, n_bytes, WHAT, "-ub, -c")? })
    }

    /// Allocates the memory and fills in the buffers that never change.
    pub fn new(gpu: &Device, stream: &Stream, layout: &WorkspaceLayout) -> Result<Workspace> {
        let workspace = Workspace::of(gpu, layout.n_bytes())?;
        let n_iota = (layout.iota.len() / 4) as u32;
        let iota: Vec<u8> = (0..n_iota).flat_map(u32::to_le_bytes).collect();
        let n_ones = layout.ones.len() / 4;
        let ones: Vec<u8> = (0..n_ones).flat_map(|_| 1f32.to_le_bytes()).collect();
        stream.upload_now(workspace.slice(&layout.iota), &iota)?;
        stream.upload_now(workspace.slice(&layout.ones), &ones)?;
        stream.fill(workspace.slice(&layout.zeros), 0)?;
        // The host gets the route in one piece, with the gaps between its parts.
        for range in [&layout.ffn.lookup.tables, &layout.ffn.route] {
            stream.fill(workspace.slice(range), 0)?;
        }
        // After a failure the device goes on without the sums of some experts.
        stream.fill(workspace.slice(&layout.ffn.experts.partial), 0)?;
        stream.synchronize()?;
        Ok(workspace)
    }

    pub fn slice(&self, range: &ByteRange) -> DeviceSlice<'_> {
        self.buffer.slice(range.clone())
    }

    /// The first `n` f32s or u32s of a range.
    pub fn words(&self, range: &ByteRange, n: usize) -> DeviceSlice<'_> {
        self.slice(range).slice(0..4 * n)
    }
}
