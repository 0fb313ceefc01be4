//! Attention over the KV cache on the device; twin in `cpu::attention`, whose terms these are.

use super::cache::DeviceRows;
use super::{Args, Device, DeviceSlice, Kernel, Launch, Stream};
use crate::Result;

/// Threads of a block of the kernels of `kernels/attention.cu`.
const SPLIT_THREADS: u32 = 256;
const COMBINE_THREADS: u32 = 128;
/// Positions that a block takes, as the CPU's threads.
const SPLIT: usize = 512;
const TILE: usize = 64;
/// Heads that a block can take, one kernel each.
const ROWS: [usize; 5] = [1, 2, 4, 8, 16];
/// Shared memory that every device gives a block.
const SHARED_BYTES: usize = 48 << 10;
/// More than this for partial results is not worth fewer launches.
const WORK_BYTES: usize = 64 << 20;
/// Blocks along z, the smallest limit of a grid.
const GRID_MAX: usize = 65_535;

/// As `cpu::attention::DistanceBias`: f32 [n_head, 2·reach + 1].
#[derive(Clone, Copy, Debug)]
pub struct DeviceBias<'a> {
    pub reach: usize,
    pub values: DeviceSlice<'a>,
}

/// As `cpu::attention::AttentionShape`, with its numbers in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttention<'a> {
    pub n_head: usize,
    pub n_head_kv: usize,
    /// u32: position of the first query. It is read when the kernels run, so that a graph can be
    /// run again as the text grows.
    pub past: DeviceSlice<'a>,
    /// No query of this launch, or of the graph that it becomes, sees positions from here on.
    pub max_seen: usize,
    pub all: Option<usize>,
    pub window: Option<usize>,
    pub scale: f32,
    /// f32 [n_head]
    pub sinks: Option<DeviceSlice<'a>>,
    pub bias: Option<DeviceBias<'a>>,
}

impl DeviceAttention<'_> {
    /// Splits that a query can see something of.
    fn slots(&self, n_ctx: usize) -> usize {
        let all = self.max_seen.min(n_ctx).div_ceil(SPLIT).max(1);
        self.window.map_or(all, |window| all.min(window.div_ceil(SPLIT) + 1))
    }

    fn group(&self) -> usize {
        self.n_head / self.n_head_kv
    }

    /// What a query sees, as all kernels take it.
    fn seen_args(&self, args: Args, first_token: usize, n_ctx: usize) -> Args {
        let limit = self.max_seen.min(n_ctx);
        let or_none =
            |n: Option<usize>| n.map_or(u32::MAX, |n| n.min(u32::MAX as usize - 1) as u32);
        let args = args.slice(self.past).size(first_token).size(limit);
        args.u32(or_none(self.all)).u32(or_none(self.window))
    }

    /// # Panics
    /// If sizes do not fit each other.
    fn check(&self, tokens: usize, q: DeviceSlice, k: &DeviceRows, v: &DeviceRows) {
        let heads = self.n_head_kv;
        assert!(heads > 0 && self.n_head.is_multiple_of(heads), "{} of {heads}", self.n_head);
        assert!(k.heads == heads && v.heads == heads, "KV heads of the rows");
        k.assert_whole();
        v.assert_whole();
        assert!(self.past.holds::<u32>(1));
        assert!(q.holds::<f32>(tokens * self.n_head * k.dim), "{tokens} queries");
        assert!(self.sinks.is_none_or(|sinks| sinks.holds::<f32>(self.n_head)), "a sink a head");
        let of_bias = |bias: DeviceBias| {
            bias.reach < 1 << 30 && bias.values.holds::<f32>(self.n_head * (2 * bias.reach + 1))
        };
        assert!(self.bias.is_none_or(of_bias), "a number a head and distance");
    }
}

/// Floats of a query's partial result: acc, max, sum, on a boundary of 16 bytes.
fn record_floats(v_dim: usize) -> usize {
    (v_dim + 2).next_multiple_of(4)
}

/// Heads a block: as many as share a KV head, as far as their queries and scores have room.
fn rows_a_block(group: usize, k_dim: usize) -> usize {
    let fits = |rows: &&usize| **rows < 2 * group && shared_bytes(**rows, k_dim) <= SHARED_BYTES;
    *ROWS.iter().rev().find(fits).expect("keys of which a query fits shared memory")
}

/// As `Room` of `kernels/attention.cu` needs it.
fn shared_bytes(rows: usize, k_dim: usize) -> usize {
    4 * rows * (8 * 4 * (k_dim.div_ceil(32) | 1) + SPLIT + SPLIT / TILE)
}

pub struct Attention {
    /// By `ROWS`.
    split: [Kernel; 5],
    combine: Kernel,
}

impl Attention {
    pub fn load(gpu: &Device) -> Result<Attention> {
        let mut split = [gpu.kernel("attention_split_1")?; 5];
        for (kernel, rows) in split.iter_mut().zip(ROWS) {
            *kernel = gpu.kernel(&format!("attention_split_{rows}"))?;
        }
        Ok(Attention { split, combine: gpu.kernel("attention_combine")? })
    }

    /// Bytes of `work` with which launches of up to `tokens` tokens that see up to `max_seen`
    /// positions run at full speed.
    pub fn work_bytes(n_head: usize, v_dim: usize, max_seen: usize, tokens: usize) -> usize {
        let token = 4 * n_head * max_seen.div_ceil(SPLIT).max(1) * record_floats(v_dim);
        token * tokens.clamp(1, (WORK_BYTES / token).max(1))
    }

    /// `q` f32 [tokens, n_head, k dim] → `out` f32 [tokens, n_head, v dim]. What `work` holds is
    /// lost; with less than [`Attention::work_bytes`] of it (but for one token, at least) there are
    /// more launches, of the same result.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    #[allow(clippy::too_many_arguments)] // the twin's, a stream, and room
    pub fn launch(
        &self,
        stream: &Stream,
        shape: &DeviceAttention,
        q: DeviceSlice,
        tokens: usize,
        k: DeviceRows,
        v: DeviceRows,
        work: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        shape.check(tokens, q, &k, &v);
        assert!(out.holds::<f32>(tokens * shape.n_head * v.dim), "{tokens} results");
        let n_ctx = k.n_ctx.min(v.n_ctx);
        let a_token = 4 * shape.n_head * shape.slots(n_ctx) * record_floats(v.dim);
        let at_once = (work.len() / a_token).min(GRID_MAX);
        assert!(at_once > 0 && work.holds::<f32>(1), "{a_token} bytes of work a token");
        for first in (0..tokens).step_by(at_once) {
            let tokens = at_once.min(tokens - first);
            let q = q.slice(4 * first * shape.n_head * k.dim..q.len());
            let out = out.slice(4 * first * shape.n_head * v.dim..out.len());
            self.splits(stream, shape, q, first, tokens, &k, &v, work)?;
            self.combine(stream, shape, first, tokens, n_ctx, v.dim, work, out)?;
        }
        Ok(())
    }

    /// Partial results of tokens from `first` on, whose queries begin at `q`.
    #[allow(clippy::too_many_arguments)] // one kernel's
    fn splits(
        &self,
        stream: &Stream,
        shape: &DeviceAttention,
        q: DeviceSlice,
        first: usize,
        tokens: usize,
        k: &DeviceRows,
        v: &DeviceRows,
        work: DeviceSlice,
    ) -> Result<()> {
        let n_ctx = k.n_ctx.min(v.n_ctx);
        let rows = rows_a_block(shape.group(), k.dim);
        let args = Args::new().slice(q);
        let args = args.slice(k.data).u32(k.type_code()).size(k.dim).size(k.row_bytes());
        let args = args.slice(v.data).u32(v.type_code()).size(v.dim).size(v.row_bytes());
        let args = args.u32(u32::from(!v.is_even())).size(k.n_ctx).size(v.n_ctx);
        let args = shape.seen_args(args.size(shape.n_head).size(shape.group()), first, n_ctx);
        let args = args.f32(shape.scale).optional(shape.bias.map(|bias| bias.values));
        let args = args.size(shape.bias.map_or(0, |bias| bias.reach)).slice(work);
        let parts = shape.n_head_kv * shape.group().div_ceil(rows);
        let launch = Launch {
            kernel: self.split[rows.trailing_zeros() as usize],
            grid: [shape.slots(n_ctx) as u32, parts as u32, tokens as u32],
            block: [SPLIT_THREADS, 1, 1],
            shared_bytes: shared_bytes(rows, k.dim) as u32,
            args: &args,
        };
        // SAFETY: the arguments are the kernel's. It reads queries of so many tokens, rows below
        // n_ctx and max_seen, and writes a record a token, head and split: all asserted.
        unsafe { stream.launch(&launch) }
    }

    /// Adds up the partial results of tokens from `first` on, whose results begin at `out`.
    #[allow(clippy::too_many_arguments)] // one kernel's
    fn combine(
        &self,
        stream: &Stream,
        shape: &DeviceAttention,
        first: usize,
        tokens: usize,
        n_ctx: usize,
        v_dim: usize,
        work: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let args = Args::new().slice(work).size(shape.slots(n_ctx)).size(v_dim);
        let args = shape.seen_args(args, first, n_ctx).optional(shape.sinks).slice(out);
        let launch = Launch {
            kernel: self.combine,
            grid: [shape.n_head as u32, tokens as u32, 1],
            block: [COMBINE_THREADS, 1, 1],
            shared_bytes: 0,
            args: &args,
        };
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&launch) }
    }
}
