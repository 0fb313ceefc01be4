//! Attention over the KV cache on the device; twin in `cpu::attention`, whose terms these are.
//!
//! # Two ways
//!
//! - **Exact** (`kernels/attention.cu`): the twin's products in the twin's order, to the bit, for
//!   rows of any type and length. A block takes one split of 512 positions for one token and the
//!   heads that share a KV head.
//! - **Tensor cores** (`kernels/attention_prompt.cu`): queries, keys, exponentials and values
//!   rounded to f16, sums in f32. In the tests the largest difference from the twin is 7·10⁻⁴ of
//!   the largest value; one rounding to f16 is up to 5·10⁻⁴. For queries of a prompt
//!   ([`DeviceAttention::prompt`]) over rows of F16 or of blocks, of a multiple of 16 elements, up
//!   to 256, if the device has the shared memory.
//!
//! Which of them it is depends on the shape, the device and `prompt`, and on nothing else: not on
//! the number of tokens. In either, a query's bits depend on what it sees alone. So neither the
//! tokens beside it nor the cut of a prompt change what a model says.

use super::cache::DeviceRows;
use super::{Args, Device, DeviceSlice, GRID_MAX, Kernel, Launch, Stream};
use crate::Result;

/// Threads of a block of the kernels of `kernels/attention.cu`.
const SPLIT_THREADS: u32 = 256;
const COMBINE_THREADS: u32 = 128;
/// Positions that a block takes, as the CPU's threads.
const SPLIT: usize = 512;
const TILE: usize = 64;
/// Of `kernels/attention_prompt.cu`: threads and queries of a block, positions of a split, and the
/// lengths of values that there are kernels for.
const PROMPT_THREADS: u32 = 128;
const PROMPT_ROWS: usize = 64;
const PROMPT_SPLIT: usize = 4096;
const PROMPT_DIMS: [usize; 3] = [64, 128, 256];
/// Heads that a block can take, one kernel each.
const ROWS: [usize; 5] = [1, 2, 4, 8, 16];
/// Shared memory that every device gives a block.
const SHARED_BYTES: usize = 48 << 10;
/// More than this for partial results is not worth fewer launches.
const WORK_BYTES: usize = 64 << 20;

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
    /// The queries are of a prompt and need not have the twin's bits.
    pub prompt: bool,
}

impl DeviceAttention<'_> {
    /// Splits of `len` positions of which queries of `tokens` tokens in a row see something.
    fn slots(&self, len: usize, tokens: usize, n_ctx: usize) -> usize {
        let all = self.max_seen.min(n_ctx).div_ceil(len).max(1);
        let of = |window: usize| window.saturating_add(tokens - 1).div_ceil(len) + 1;
        self.window.map_or(all, |window| all.min(of(window)))
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

/// Halves of 64 queries, and of a tile's keys or values, each row 16 bytes longer than it is.
fn prompt_shared_bytes(k_dim: usize, v_dim: usize) -> usize {
    2 * (PROMPT_ROWS * (k_dim + 8) + TILE * (k_dim.max(v_dim) + 8))
}

/// One launch's operands; tokens are `first..first + tokens` of the call, whose queries and results
/// begin at `q` and `out`.
#[derive(Clone, Copy)]
struct Part<'a> {
    shape: &'a DeviceAttention<'a>,
    first: usize,
    tokens: usize,
    q: DeviceSlice<'a>,
    k: DeviceRows<'a>,
    v: DeviceRows<'a>,
    work: DeviceSlice<'a>,
    out: DeviceSlice<'a>,
    /// Positions of a split, and records a query.
    split_len: usize,
    slots: usize,
}

impl Part<'_> {
    fn n_ctx(&self) -> usize {
        self.k.n_ctx.min(self.v.n_ctx)
    }

    fn bias_args(&self, args: Args) -> Args {
        let bias = self.shape.bias;
        let args = args.f32(self.shape.scale).optional(bias.map(|bias| bias.values));
        args.size(bias.map_or(0, |bias| bias.reach))
    }
}

pub struct Attention {
    /// By `ROWS`.
    split: [Kernel; 5],
    /// By `PROMPT_DIMS`.
    prompt: [Kernel; 3],
    combine: Kernel,
    shared_bytes_max: usize,
}

impl Attention {
    pub fn load(gpu: &Device) -> Result<Attention> {
        let find = |names: &[String]| names.iter().map(|name| gpu.kernel(name)).collect();
        let split: Result<Vec<Kernel>> = find(&ROWS.map(|n| format!("attention_split_{n}")));
        let prompt: Result<Vec<Kernel>> =
            find(&PROMPT_DIMS.map(|n| format!("attention_prompt_{n}")));
        Ok(Attention {
            split: split?.try_into().expect("as many as asked for"),
            prompt: prompt?.try_into().expect("as many as asked for"),
            combine: gpu.kernel("attention_combine")?,
            shared_bytes_max: gpu.info().shared_bytes_max as usize,
        })
    }

    /// Whether queries of a prompt over such rows go to the tensor cores.
    pub fn has_prompt_kernel(&self, k: &DeviceRows, v: &DeviceRows) -> bool {
        let takes = |rows: &DeviceRows| {
            rows.dim.is_multiple_of(16) && rows.dim <= 256 && rows.can_load_eight()
        };
        // Static shared memory is a float a query.
        let shared = prompt_shared_bytes(k.dim, v.dim) + 4 * PROMPT_ROWS;
        takes(k) && takes(v) && shared <= self.shared_bytes_max
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
        let (q_token, out_token) = (4 * shape.n_head * k.dim, 4 * shape.n_head * v.dim);
        assert!(out.len() >= tokens * out_token && out.holds::<f32>(0), "{tokens} results");
        let prompt = shape.prompt && self.has_prompt_kernel(&k, &v);
        let split_len = if prompt { PROMPT_SPLIT } else { SPLIT };
        let slots = shape.slots(split_len, 1, k.n_ctx.min(v.n_ctx));
        let work_token = 4 * shape.n_head * slots * record_floats(v.dim);
        let at_once = (work.len() / work_token).min(GRID_MAX);
        assert!(at_once > 0, "{work_token} bytes of work a token, got {}", work.len());
        assert!(work.address().is_multiple_of(16), "records are written several numbers at a time");
        for first in (0..tokens).step_by(at_once) {
            let tokens = at_once.min(tokens - first);
            let q = q.slice(first * q_token..q.len());
            let out = out.slice(first * out_token..out.len());
            let part = Part { shape, first, tokens, q, k, v, work, out, split_len, slots };
            if prompt {
                self.tensor(stream, part)?
            } else {
                self.exact(stream, part)?
            }
            self.combine(stream, part)?;
        }
        Ok(())
    }

    fn exact(&self, stream: &Stream, part: Part) -> Result<()> {
        let Part { shape, k, v, .. } = part;
        let rows = rows_a_block(shape.group(), k.dim);
        let args = Args::new().slice(part.q);
        let args = args.slice(k.data).u32(k.type_code()).size(k.dim).size(k.row_bytes());
        let args = args.slice(v.data).u32(v.type_code()).size(v.dim).size(v.row_bytes());
        let args = args.u32(u32::from(!v.can_load_four())).size(k.n_ctx).size(v.n_ctx);
        let args = args.size(shape.n_head).size(shape.group());
        let args = part.bias_args(shape.seen_args(args, part.first, part.n_ctx()));
        let args = args.slice(part.work);
        let heads = shape.n_head_kv * shape.group().div_ceil(rows);
        let launch = Launch {
            kernel: self.split[rows.trailing_zeros() as usize],
            grid: [part.slots as u32, heads as u32, part.tokens as u32],
            block: [SPLIT_THREADS, 1, 1],
            shared_bytes: shared_bytes(rows, k.dim) as u32,
            args: &args,
        };
        // SAFETY: the arguments are the kernel's. It reads queries of so many tokens, rows below
        // n_ctx and max_seen, and writes a record a token, head and split: all asserted.
        unsafe { stream.launch(&launch) }
    }

    fn tensor(&self, stream: &Stream, part: Part) -> Result<()> {
        let Part { shape, k, v, .. } = part;
        let args = Args::new().slice(part.q);
        let args = args.slice(k.data).u32(k.type_code()).size(k.dim).size(k.row_bytes());
        let args = args.slice(v.data).u32(v.type_code()).size(v.dim).size(v.row_bytes());
        let args = args.size(k.n_ctx).size(v.n_ctx).size(shape.n_head).size(shape.group());
        let args = args.size(part.tokens).size(part.slots);
        let args = part.bias_args(shape.seen_args(args, part.first, part.n_ctx()));
        let args = args.slice(part.work);
        let tokens_a_block = (PROMPT_ROWS / shape.group()).max(1);
        let blocks = part.tokens.div_ceil(tokens_a_block);
        let heads = shape.n_head_kv * shape.group().div_ceil(PROMPT_ROWS);
        let slots = shape.slots(PROMPT_SPLIT, tokens_a_block, part.n_ctx());
        let kernel = PROMPT_DIMS.iter().position(|dim| v.dim <= *dim).expect("a length taken");
        let launch = Launch {
            kernel: self.prompt[kernel],
            grid: [blocks as u32, heads as u32, slots as u32],
            block: [PROMPT_THREADS, 1, 1],
            shared_bytes: prompt_shared_bytes(k.dim, v.dim) as u32,
            args: &args,
        };
        // SAFETY: as above.
        unsafe { stream.launch(&launch) }
    }

    /// Adds up the partial results.
    fn combine(&self, stream: &Stream, part: Part) -> Result<()> {
        let Part { shape, v, .. } = part;
        let args = Args::new().slice(part.work).size(part.slots).size(part.split_len).size(v.dim);
        let args = shape.seen_args(args, part.first, part.n_ctx());
        let args = args.optional(shape.sinks).slice(part.out);
        let launch = Launch {
            kernel: self.combine,
            grid: [shape.n_head as u32, part.tokens as u32, 1],
            block: [COMBINE_THREADS, 1, 1],
            shared_bytes: 0,
            args: &args,
        };
        // SAFETY: the arguments are the kernel's; a record a token, head and split is there, and so
        // is room for the results (asserted).
        unsafe { stream.launch(&launch) }
    }
}
