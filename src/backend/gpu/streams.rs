//! Several residual streams a token (`kernels/streams.cu`). Twins: `cpu::streams` and
//! `forward::streams`.

use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::backend::ops::{DEVICE_SOURCES_MAX, DEVICE_STREAMS_MAX};

const THREADS: u32 = 256;

kernel_params! {
    pub struct JoinStreamsParams[72] {
        streams: DevicePtr,
        mixes: DevicePtr,
        scales: DevicePtr,
        bases: DevicePtr,
        weights: DevicePtr,
        out: DevicePtr,
        n: u32,
        width: u32,
        n_embd: u32,
        eps: f32,
        magnitude: f32,
        rounds: u32,
    }
}

kernel_params! {
    pub struct FeedStreamsParams[40] {
        streams: DevicePtr,
        weights: DevicePtr,
        y: DevicePtr,
        n: u32,
        width: u32,
        first: u32,
        n_embd: u32,
    }
}

kernel_params! {
    pub struct MeanSiluParams[16] {
        x: DevicePtr,
        divisor: f32,
        n: u32,
    }
}

kernel_params! {
    pub struct JoinGatedParams[48] {
        normed: DevicePtr,
        gates: DevicePtr,
        mixes: DevicePtr,
        weights: DevicePtr,
        out: DevicePtr,
        n: u32,
        n_embd: u32,
    }
}

kernel_params! {
    pub struct ScoreStreamsParams[32] {
        sources: DevicePtr,
        weight: DevicePtr,
        scores: DevicePtr,
        eps: f32,
        n_embd: u32,
    }
}

kernel_params! {
    pub struct RecallStreamsParams[32] {
        sources: DevicePtr,
        scores: DevicePtr,
        out: DevicePtr,
        n: u32,
        n_embd: u32,
    }
}

kernel_params! {
    pub struct GateNgramsParams[32] {
        key: DevicePtr,
        query: DevicePtr,
        value: DevicePtr,
        scale: f32,
        n_embd: u32,
    }
}

kernels! {
    pub struct Streams {
        join: JoinStreamsParams = "join_streams",
        feed: FeedStreamsParams = "feed_streams",
        mean_silu: MeanSiluParams = "mean_silu",
        join_gated: JoinGatedParams = "join_gated",
        score: ScoreStreamsParams = "score_streams",
        recall: RecallStreamsParams = "recall_streams",
        gate_ngrams: GateNgramsParams = "gate_ngrams",
    }
}

/// The form of a token's hyper-connection; see `ops::Mixing`.
#[derive(Clone, Copy)]
pub struct DeviceMixing<'a> {
    /// Streams of a token.
    pub n: usize,
    /// f32 [1 to 3] and f32 [mixes of a token].
    pub scales: DeviceSlice<'a>,
    pub bases: DeviceSlice<'a>,
    pub eps: f32,
    pub magnitude: f32,
    pub rounds: usize,
}

/// Weights of a token's streams: f32 [tokens, width], of outputs from `first` on.
#[derive(Clone, Copy)]
pub struct OutputWeights<'a> {
    pub all: DeviceSlice<'a>,
    pub width: usize,
    pub first: usize,
}

/// Streams whose mean a part reads.
#[derive(Clone, Copy)]
pub struct GatedStreams<'a> {
    /// f32 [tokens, n, n_embd]
    pub streams: DeviceSlice<'a>,
    /// Numbers of the streams' shape, whose sigmoids multiply the streams, if there are some.
    pub gates: Option<DeviceSlice<'a>>,
    /// Mixes and the weights of outputs that they make, f32 [tokens, n] both.
    pub weights: Option<[DeviceSlice<'a>; 2]>,
}

/// The tokens of `out` f32 [tokens, n_embd] and their streams f32 [tokens, n, n_embd].
fn n_embd_of(n: usize, tokens: usize, streams: DeviceSlice, out: DeviceSlice) -> usize {
    let all = out.count::<f32>();
    assert!(tokens > 0 && all.is_multiple_of(tokens), "{all} values of {tokens} tokens");
    assert!(n <= DEVICE_STREAMS_MAX && streams.count::<f32>() == n * all, "{n} streams");
    all / tokens
}

/// A thread for each element of a token, a row of blocks a token.
fn grid(n_embd: usize, tokens: usize) -> Grid {
    Grid::new([u32_of(n_embd).div_ceil(THREADS), u32_of(tokens), 1], THREADS)
}

impl Streams {
    /// `mixes` → `weights`, both f32 [tokens, width], and `out` f32 [tokens, n_embd], the sum of
    /// the streams by the weights of inputs: `Cpu::stream_weights` and `Cpu::join_streams`.
    pub fn join(
        &self,
        stream: &Stream,
        mixing: &DeviceMixing,
        streams: DeviceSlice,
        [mixes, weights]: [DeviceSlice; 2],
        out: DeviceSlice,
    ) -> Result<()> {
        let (n, width) = (mixing.n, mixing.bases.count::<f32>());
        let tokens = mixes.count::<f32>() / width;
        if tokens == 0 {
            return Ok(());
        }
        let n_embd = n_embd_of(n, tokens, streams, out);
        assert!([n, 2 * n, (2 + n) * n].contains(&width), "{width} mixes of {n} streams");
        let n_kinds = width.div_ceil(n).min(3);
        assert!(mixing.scales.count::<f32>() >= n_kinds && weights.len() == mixes.len());
        let params = JoinStreamsParams {
            streams: streams.into(),
            mixes: mixes.into(),
            scales: mixing.scales.into(),
            bases: mixing.bases.into(),
            weights: weights.into(),
            out: out.into(),
            n: u32_of(n),
            width: u32_of(width),
            n_embd: u32_of(n_embd),
            eps: mixing.eps,
            magnitude: mixing.magnitude,
            rounds: u32_of(mixing.rounds),
        };
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.join, grid(n_embd, tokens), &params) }
    }

    /// Feeds `y` f32 [tokens, n_embd] to `n` streams: `Cpu::feed_streams`, or `Cpu::add_to_streams`
    /// by weights of outputs alone.
    pub fn feed(
        &self,
        stream: &Stream,
        n: usize,
        weights: OutputWeights,
        y: DeviceSlice,
        streams: DeviceSlice,
    ) -> Result<()> {
        let OutputWeights { all, width, first } = weights;
        let tokens = all.count::<f32>() / width;
        if tokens == 0 {
            return Ok(());
        }
        let n_embd = n_embd_of(n, tokens, streams, y);
        assert!([n, (1 + n) * n].contains(&(width - first)), "{width} weights of {n} streams");
        let params = FeedStreamsParams {
            streams: streams.into(),
            weights: all.into(),
            y: y.into(),
            n: u32_of(n),
            width: u32_of(width),
            first: u32_of(first),
            n_embd: u32_of(n_embd),
        };
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.feed, grid(n_embd, tokens), &params) }
    }

    /// `x = v · σ(v)`, `v = x / divisor`
    pub fn mean_silu(&self, stream: &Stream, x: DeviceSlice, divisor: usize) -> Result<()> {
        let n = x.count::<f32>();
        if n == 0 {
            return Ok(());
        }
        let params = MeanSiluParams { x: x.into(), divisor: divisor as f32, n: u32_of(n) };
        // SAFETY: the slice has n values.
        unsafe { stream.launch(self.mean_silu, Grid::each(n, THREADS), &params) }
    }

    /// `out` f32 [tokens, n_embd]: the mean of `gated.streams`.
    pub fn join_gated(
        &self,
        stream: &Stream,
        [tokens, n]: [usize; 2],
        gated: &GatedStreams,
        out: DeviceSlice,
    ) -> Result<()> {
        if tokens == 0 {
            return Ok(());
        }
        let GatedStreams { streams, gates, weights } = *gated;
        let n_embd = n_embd_of(n, tokens, streams, out);
        assert!(gates.is_none_or(|gates| gates.len() == streams.len()));
        let mut each = weights.iter().flatten();
        assert!(each.all(|part| part.count::<f32>() == tokens * n));
        let [mixes, weights] = weights.map_or([None; 2], |parts| parts.map(Some));
        let params = JoinGatedParams {
            normed: streams.into(),
            gates: gates.into(),
            mixes: mixes.into(),
            weights: weights.into(),
            out: out.into(),
            n: u32_of(n),
            n_embd: u32_of(n_embd),
        };
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.join_gated, grid(n_embd, tokens), &params) }
    }

    /// `out` f32 [tokens, n_embd]: the mean of `sources` f32 [n, tokens, n_embd] by the softmax of
    /// their scores, which are left in `scores` f32 [tokens, n]: `Cpu::recall_streams`.
    pub fn recall(
        &self,
        stream: &Stream,
        sources: DeviceSlice,
        weight: DeviceSlice,
        eps: f32,
        scores: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let (n_embd, all) = (weight.count::<f32>(), out.count::<f32>());
        if all == 0 {
            return Ok(());
        }
        let (tokens, n) = (all / n_embd, sources.count::<f32>() / all);
        assert!(all == tokens * n_embd && sources.count::<f32>() == n * all);
        assert!((1..=DEVICE_SOURCES_MAX).contains(&n), "{n} streams");
        assert_eq!(scores.count::<f32>(), tokens * n);
        let (n_u32, n_embd_u32) = (u32_of(n), u32_of(n_embd));
        let params = ScoreStreamsParams {
            sources: sources.into(),
            weight: weight.into(),
            scores: scores.into(),
            eps,
            n_embd: n_embd_u32,
        };
        let each = Grid::new([u32_of(tokens), n_u32, 1], THREADS);
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.score, each, &params)? };
        let params = RecallStreamsParams {
            sources: sources.into(),
            scores: scores.into(),
            out: out.into(),
            n: n_u32,
            n_embd: n_embd_u32,
        };
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.recall, grid(n_embd, tokens), &params) }
    }

    /// `key` f32 [tokens, n, n_embd] becomes `value` f32 [tokens, n_embd] times the gate that it
    /// makes with `query`, which has its shape.
    pub fn gate_ngrams(
        &self,
        stream: &Stream,
        [tokens, n]: [usize; 2],
        [key, query]: [DeviceSlice; 2],
        value: DeviceSlice,
    ) -> Result<()> {
        if tokens == 0 {
            return Ok(());
        }
        let n_embd = value.count::<f32>() / tokens;
        assert_eq!(value.count::<f32>(), tokens * n_embd);
        assert_eq!([key, query].map(DeviceSlice::count::<f32>), [tokens * n * n_embd; 2]);
        let params = GateNgramsParams {
            key: key.into(),
            query: query.into(),
            value: value.into(),
            scale: 1.0 / (n_embd as f32).sqrt(),
            n_embd: u32_of(n_embd),
        };
        let grid = Grid::new([u32_of(n), u32_of(tokens), 1], THREADS);
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.gate_ngrams, grid, &params) }
    }
}
