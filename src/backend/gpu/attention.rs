//! Attention over the KV cache on the device. Twin: `cpu::attention`, which explains the terms.
//!
//! # Two ways
//!
//! - **Exact** (`kernels/attention.cu`): the twin's products in the twin's order, to the bit, for
//!   rows of any type and length. A block takes one split of 512 positions for one token and the
//!   heads that share a KV head.
//! - **Tensor cores** (`kernels/attention_prompt.cu`): queries, keys, exponentials and values
//!   rounded to f16, sums in f32. In the tests the largest difference from the twin is 7·10⁻⁴ of
//!   the largest value; one rounding to f16 is up to 5·10⁻⁴. For queries of a prompt
//!   ([`DeviceAttention::prompt`]) over rows of F16 or of blocks, of a multiple of 8 elements, up
//!   to 256, if the device has the shared memory.
//!
//! The choice depends on the shape, the device and `prompt` only, not on the number of tokens. In
//! both ways a query's bits depend only on what it sees. So neither the other tokens of a launch
//! nor the division of a prompt change what a model says.

use super::acts::DeviceActs;
use super::cache::DeviceRows;
use super::{
    Device, DevicePtr, DeviceSlice, GRID_MAX, Grid, Kernel, Stream, kernel_params, u32_of,
};
use crate::Result;
use crate::simd::ActKind;

/// Threads of a block of the kernels of `kernels/attention.cu`.
const SPLIT_THREADS: u32 = 256;
const COMBINE_THREADS: u32 = 128;
/// The positions of a block, as of the CPU's threads.
const SPLIT: usize = 512;
const TILE: usize = 64;
/// In `kernels/attention_prompt.cu`: threads and queries of a block, positions of a split, and the
/// largest length of values of each kernel.
const PROMPT_THREADS: u32 = 128;
const PROMPT_ROWS: usize = 64;
const PROMPT_SPLIT: usize = 4096;
/// A split that has all positions.
const ALL_POSITIONS: usize = 1 << 31;
const PROMPT_DIMS: [usize; 3] = [64, 128, 256];
/// The numbers of heads of a block, with one kernel for each.
const ROWS: [usize; 5] = [1, 2, 4, 8, 16];
/// A tile of keys or values in shared memory: `STAGE_BYTES` of `kernels/attention.cu`.
const STAGE_BYTES: usize = TILE * (256 + 16);
/// The most memory for partial results; more would not pay for the fewer launches.
const WORK_BYTES: usize = 64 << 20;

kernel_params! {
    pub struct AttentionParams[144] {
        q: DevicePtr,
        k: DevicePtr,
        k_type: u32,
        k_dim: u32,
        k_row: u32,
        k_ctx: u32,
        v: DevicePtr,
        v_type: u32,
        v_dim: u32,
        v_row: u32,
        v_ctx: u32,
        loose: u32,
        n_head: u32,
        group: u32,
        first_token: u32,
        past: DevicePtr,
        limit: u32,
        all: u32,
        window: u32,
        scale: f32,
        bias: DevicePtr,
        reach: u32,
        n_tokens: u32,
        work: DevicePtr,
        n_slots: u32,
        chunk: u32,
        cap: f32,
        lists: u32,
        split_len: u32,
        begin: u32,
    }
}

kernel_params! {
    pub struct CombineParams[96] {
        work: DevicePtr,
        n_slots: u32,
        split_len: u32,
        v_dim: u32,
        first_token: u32,
        past: DevicePtr,
        limit: u32,
        all: u32,
        window: u32,
        chunk: u32,
        sinks: DevicePtr,
        out: DevicePtr,
        q8_0: DevicePtr,
        q8_k: DevicePtr,
        n_head: u32,
        heads: u32,
        lists: u32,
        unused: u32,
    }
}

/// `ops::DistanceBias`, with its values in device memory.
#[derive(Clone, Copy, Debug)]
pub enum DeviceBias<'a> {
    /// f32 [n_head, 2·reach + 1]
    Near { reach: usize, values: DeviceSlice<'a> },
    /// f32 `[n_head]`: factors on the distance.
    Slopes(DeviceSlice<'a>),
}

impl<'a> DeviceBias<'a> {
    fn values(self) -> DeviceSlice<'a> {
        match self {
            DeviceBias::Near { values, .. } | DeviceBias::Slopes(values) => values,
        }
    }

    /// The kernels' number for slopes is u32::MAX.
    fn reach(self) -> u32 {
        match self {
            DeviceBias::Near { reach, .. } => u32_of(reach),
            DeviceBias::Slopes(_) => u32::MAX,
        }
    }

    fn is_for(self, n_head: usize) -> bool {
        match self {
            DeviceBias::Near { reach, values } => {
                reach < 1 << 30 && values.holds::<f32>(n_head * (2 * reach + 1))
            }
            DeviceBias::Slopes(values) => values.holds::<f32>(n_head),
        }
    }
}

/// `cpu::attention::AttentionShape`, with its numbers in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttention<'a> {
    pub n_head: usize,
    pub n_head_kv: usize,
    /// u32: position of the first query, or the last place of each list. It is read when kernels
    /// run, so that a graph can be run again as the text grows.
    pub past: DeviceSlice<'a>,
    /// No query of this launch, or of the graph that it becomes, sees positions from here on.
    pub max_seen: usize,
    pub all: Option<usize>,
    pub window: Option<usize>,
    pub chunk: Option<usize>,
    pub scale: f32,
    pub cap: Option<f32>,
    /// f32 `[n_head]`
    pub sinks: Option<DeviceSlice<'a>>,
    pub bias: Option<DeviceBias<'a>>,
    /// The queries are of a prompt and need not have the twin's bits.
    pub prompt: bool,
    /// Lists of positions of a token, whose rows are its own: keys and values are [tokens,
    /// n_head_kv] heads of as many rows as the longest list has, which are the text of the token.
    /// `past` is u32 [tokens, lists], the place of the last of each list: of one for all heads, or
    /// of one for each KV head. They are computed exactly. 0 where tokens share the rows of a text.
    pub lists: usize,
}

impl DeviceAttention<'_> {
    /// The number of splits of `len` positions of which the queries of `tokens` consecutive tokens
    /// see something.
    fn slots(&self, len: usize, tokens: usize, n_ctx: usize) -> usize {
        let all = self.max_seen.min(n_ctx).div_ceil(len).max(1);
        let of = |window: usize| window.saturating_add(tokens - 1).div_ceil(len) + 1;
        self.window.or(self.chunk).map_or(all, |window| all.min(of(window)))
    }

    fn group(&self) -> usize {
        self.n_head / self.n_head_kv
    }

    /// No query sees positions from here on.
    fn limit(&self, n_ctx: usize) -> u32 {
        u32_of(self.max_seen.min(n_ctx))
    }

    /// # Panics
    /// If sizes do not fit each other.
    fn check(&self, tokens: usize, q: DeviceSlice, k: &DeviceRows, v: &DeviceRows) {
        let (heads, lists) = (self.n_head_kv, self.lists);
        assert!(heads > 0 && self.n_head.is_multiple_of(heads), "{} of {heads}", self.n_head);
        let of_rows = if lists > 0 { tokens * heads } else { heads };
        assert!(k.heads == of_rows && v.heads == of_rows, "KV heads of the rows");
        assert!([0, 1, heads].contains(&lists), "{lists} lists of {heads} heads");
        k.assert_whole();
        v.assert_whole();
        assert!(self.past.holds::<u32>((tokens * lists).max(1)));
        assert!(q.holds::<f32>(tokens * self.n_head * k.dim), "{tokens} queries");
        assert!(self.sinks.is_none_or(|sinks| sinks.holds::<f32>(self.n_head)), "a sink a head");
        let is_whole = self.bias.is_none_or(|bias| bias.is_for(self.n_head));
        assert!(is_whole, "a number a head and distance, or a head");
    }
}

/// The kernels' number for `all`, `window` or `chunk`: u32::MAX is none.
fn or_none(n: Option<usize>) -> u32 {
    n.map_or(u32::MAX, |n| n.min(u32::MAX as usize - 1) as u32)
}

/// The operands of [`Attention::launch`].
#[derive(Clone, Copy)]
pub struct AttentionData<'a> {
    /// The number of queries' tokens.
    pub tokens: usize,
    /// f32 [tokens, n_head, k dim]
    pub q: DeviceSlice<'a>,
    pub k: DeviceRows<'a>,
    pub v: DeviceRows<'a>,
    /// Scratch memory on a multiple of 16 bytes, see [`Attention::work_bytes`].
    pub work: DeviceSlice<'a>,
    /// f32 [tokens, n_head, v dim]
    pub out: DeviceSlice<'a>,
    /// Records of `out` that are stored besides, a token each, of Q8_0 or Q8_K: the bits of
    /// `Quantize::store`. [`records_fit`] says whether there may be any.
    pub records: Option<DeviceActs<'a>>,
}

/// The heads of which a block stores records: the fewest that are whole blocks of theirs.
fn heads_a_block(kind: ActKind, v_dim: usize) -> usize {
    (kind.block_len() / v_dim).max(1)
}

/// Whether the attention of `n_head` heads can store its result in records of this kind.
pub fn records_fit(kind: ActKind, n_head: usize, v_dim: usize) -> bool {
    let heads = heads_a_block(kind, v_dim);
    let is_block = (heads * v_dim).is_multiple_of(kind.block_len());
    kind != ActKind::F32 && is_block && n_head.is_multiple_of(heads)
}

/// The number of floats of a query's partial result: acc, max, sum, on a boundary of 16 bytes.
fn record_floats(v_dim: usize) -> usize {
    (v_dim + 2).next_multiple_of(4)
}

/// The blocks of a launch by the heads that each takes, and what there is for them.
#[derive(Clone, Copy, Debug)]
struct Load {
    group: usize,
    k_dim: usize,
    /// Pairs of a token's split and a KV head.
    pairs: usize,
    multiprocessors: usize,
    shared_bytes_max: usize,
}

impl Load {
    /// The heads of a block: those that share a KV head and whose queries and scores fit shared
    /// memory, so that keys and values are read once for them; fewer if a device with one block a
    /// multiprocessor would be partly idle. Results do not depend on it.
    fn rows_a_block(&self) -> usize {
        let fits = |rows: &&usize| {
            **rows < 2 * self.group && shared_bytes(**rows, self.k_dim) <= self.shared_bytes_max
        };
        let mut fitting = ROWS.iter().filter(fits).rev();
        let fills =
            |rows: &&usize| self.pairs * self.group.div_ceil(**rows) >= self.multiprocessors;
        let least = *fitting.clone().next_back().expect("keys of which a query fits shared memory");
        fitting.find(fills).copied().unwrap_or(least)
    }
}

/// The shared memory of `Scratch` in `kernels/attention.cu`.
fn shared_bytes(rows: usize, k_dim: usize) -> usize {
    let stages = if rows <= 2 { 3 } else { 2 };
    let floats = rows * (8 * 4 * (k_dim.div_ceil(32) | 1) + SPLIT + SPLIT / TILE);
    4 * floats + stages * STAGE_BYTES
}

/// The shared memory of `kernels/attention_prompt.cu`: halves of 64 queries and of a tile's keys or
/// values, each row padded by 16 bytes.
fn prompt_shared_bytes(k_dim: usize, v_dim: usize) -> usize {
    let [k_dim, v_dim] = [k_dim, v_dim].map(|dim| dim.next_multiple_of(16));
    2 * (PROMPT_ROWS * (k_dim + 8) + TILE * (k_dim.max(v_dim) + 8))
}

/// One launch: `data` is a part of the call's, from token `first` on.
#[derive(Clone, Copy)]
struct AttentionLaunch<'a> {
    shape: &'a DeviceAttention<'a>,
    first: usize,
    data: AttentionData<'a>,
    /// The positions of a split, and the records of a query.
    split_len: usize,
    slots: usize,
    /// The position of the first row of `data`.
    begin: usize,
}

impl AttentionLaunch<'_> {
    fn n_ctx(&self) -> usize {
        self.begin + self.data.k.n_ctx.min(self.data.v.n_ctx)
    }

    fn params(&self) -> AttentionParams {
        let AttentionLaunch { shape, data: AttentionData { k, v, .. }, .. } = *self;
        AttentionParams {
            q: self.data.q.into(),
            k: k.data.into(),
            k_type: k.type_code(),
            k_dim: u32_of(k.dim),
            k_row: u32_of(k.row_bytes()),
            k_ctx: u32_of(k.n_ctx),
            v: v.data.into(),
            v_type: v.type_code(),
            v_dim: u32_of(v.dim),
            v_row: u32_of(v.row_bytes()),
            v_ctx: u32_of(v.n_ctx),
            loose: (!v.can_load_four()).into(),
            n_head: u32_of(shape.n_head),
            group: u32_of(shape.group()),
            first_token: u32_of(self.first),
            past: shape.past.into(),
            limit: shape.limit(self.n_ctx()),
            all: or_none(shape.all),
            window: or_none(shape.window),
            scale: shape.scale,
            bias: shape.bias.map(DeviceBias::values).into(),
            reach: shape.bias.map_or(0, DeviceBias::reach),
            n_tokens: u32_of(self.data.tokens),
            work: self.data.work.into(),
            n_slots: u32_of(self.slots),
            chunk: or_none(shape.chunk),
            cap: shape.cap.unwrap_or(0.0),
            lists: u32_of(shape.lists),
            split_len: u32_of(self.split_len),
            begin: u32_of(self.begin),
        }
    }
}

pub struct Attention {
    /// By `ROWS`.
    split: [Kernel<AttentionParams>; 5],
    /// By `PROMPT_DIMS`.
    prompt: [Kernel<AttentionParams>; 3],
    combine: Kernel<CombineParams>,
    shared_bytes_max: usize,
    multiprocessors: usize,
}

impl Attention {
    pub fn load(gpu: &Device) -> Result<Attention> {
        let find = |family: &str, numbers: &[usize]| -> Result<Vec<_>> {
            numbers.iter().map(|n| Kernel::find(gpu, &format!("{family}_{n}"))).collect()
        };
        let split = find("attention_split", &ROWS)?;
        let prompt = find("attention_prompt", &PROMPT_DIMS)?;
        Ok(Attention {
            split: split.try_into().ok().expect("one for each number"),
            prompt: prompt.try_into().ok().expect("one for each number"),
            combine: Kernel::find(gpu, "attention_combine")?,
            shared_bytes_max: gpu.info().shared_bytes_max as usize,
            multiprocessors: gpu.info().multiprocessors as usize,
        })
    }

    /// Whether queries of a prompt over such rows go to the tensor cores.
    pub fn has_prompt_kernel(&self, k: &DeviceRows, v: &DeviceRows) -> bool {
        let takes = |rows: &DeviceRows| rows.dim <= 256 && rows.can_load_eight();
        // Static shared memory is a float a query.
        let shared = prompt_shared_bytes(k.dim, v.dim) + 4 * PROMPT_ROWS;
        takes(k) && takes(v) && shared <= self.shared_bytes_max
    }

    /// The bytes of `work` with which up to `tokens` tokens that see up to `max_seen` positions
    /// take the fewest launches that pay.
    pub fn work_bytes(n_head: usize, v_dim: usize, max_seen: usize, tokens: usize) -> usize {
        let token = 4 * n_head * max_seen.div_ceil(SPLIT).max(1) * record_floats(v_dim);
        token * tokens.clamp(1, (WORK_BYTES / token).max(1))
    }

    /// Computes `data.out`. With less `data.work` than [`Attention::work_bytes`] there are more
    /// launches, with the same result; it has to suffice for one token.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn launch(
        &self,
        stream: &Stream,
        shape: &DeviceAttention,
        data: AttentionData,
    ) -> Result<()> {
        let AttentionData { tokens, q, k, v, work, out, .. } = data;
        shape.check(tokens, q, &k, &v);
        let (q_token, out_token) = (4 * shape.n_head * k.dim, 4 * shape.n_head * v.dim);
        assert!(out.len() >= tokens * out_token && out.holds::<f32>(0), "{tokens} results");
        if let Some(acts) = &data.records {
            assert!(records_fit(acts.kind, shape.n_head, v.dim), "records of whole blocks");
            let cols = shape.n_head * v.dim;
            assert_eq!((acts.tokens, acts.record_cols, acts.first_col), (tokens, cols, 0));
        }
        let prompt = shape.prompt && shape.lists == 0 && self.has_prompt_kernel(&k, &v);
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
            let records = data.records.map(|records| records.token_range(first..first + tokens));
            let data = AttentionData { tokens, q, out, records, ..data };
            let part = AttentionLaunch { shape, first, data, split_len, slots, begin: 0 };
            if prompt {
                self.tensor(stream, part)?
            } else {
                self.exact(stream, part)?
            }
            self.combine(stream, part)?;
        }
        Ok(())
    }

    /// Bytes of `work` for [`Attention::launch_piece`].
    pub fn piece_work_bytes(n_head: usize, v_dim: usize, tokens: usize) -> usize {
        4 * tokens * n_head * record_floats(v_dim)
    }

    /// Launches the kernels for prompts over the rows that `data` has, which belong to the
    /// positions from `begin` on. Launches go on from the first position that is seen, or one
    /// before it; the last, whose rows end at or behind `max_seen`, computes `data.out`. `work` is
    /// kept between them.
    ///
    /// # Panics
    /// If sizes do not fit each other, or there are no such kernels ([`Attention::launch`]).
    pub fn launch_piece(
        &self,
        stream: &Stream,
        shape: &DeviceAttention,
        data: AttentionData,
        begin: usize,
    ) -> Result<()> {
        let AttentionData { tokens, q, k, v, work, out, .. } = data;
        shape.check(tokens, q, &k, &v);
        assert!(self.has_prompt_kernel(&k, &v) && data.records.is_none() && tokens <= GRID_MAX);
        let sees_past = shape.chunk.or(shape.all).is_none() && shape.lists == 0;
        assert!(sees_past, "queries see what is before them, or a window of it");
        assert!(out.holds::<f32>(tokens * shape.n_head * v.dim), "{tokens} results");
        let n_work = Self::piece_work_bytes(shape.n_head, v.dim, tokens);
        assert!(work.len() >= n_work && work.address().is_multiple_of(16), "a record a query");
        let part =
            AttentionLaunch { shape, first: 0, data, split_len: ALL_POSITIONS, slots: 1, begin };
        self.tensor(stream, part)?;
        if part.n_ctx() >= shape.max_seen { self.combine(stream, part) } else { Ok(()) }
    }

    fn exact(&self, stream: &Stream, part: AttentionLaunch) -> Result<()> {
        let AttentionLaunch { shape, data: AttentionData { tokens, k, .. }, .. } = part;
        let load = Load {
            group: shape.group(),
            k_dim: k.dim,
            pairs: part.slots * shape.n_head_kv * tokens,
            multiprocessors: self.multiprocessors,
            shared_bytes_max: self.shared_bytes_max,
        };
        let rows = load.rows_a_block();
        let heads = shape.n_head_kv * shape.group().div_ceil(rows);
        let blocks = [part.slots, heads, tokens].map(u32_of);
        let grid = Grid::new(blocks, SPLIT_THREADS).with_shared(shared_bytes(rows, k.dim));
        let kernel = self.split[rows.trailing_zeros() as usize];
        // SAFETY: the kernel reads queries of so many tokens, rows below n_ctx and max_seen, and
        // writes a record for each token, head and split: all asserted.
        unsafe { stream.launch(kernel, grid, &part.params()) }
    }

    fn tensor(&self, stream: &Stream, part: AttentionLaunch) -> Result<()> {
        let AttentionLaunch { shape, data: AttentionData { tokens, k, v, .. }, .. } = part;
        let tokens_a_block = (PROMPT_ROWS / shape.group()).max(1);
        let heads = shape.n_head_kv * shape.group().div_ceil(PROMPT_ROWS);
        let slots = shape.slots(part.split_len, tokens_a_block, part.n_ctx());
        let blocks = [tokens.div_ceil(tokens_a_block), heads, slots].map(u32_of);
        let shared_bytes = prompt_shared_bytes(k.dim, v.dim);
        let grid = Grid::new(blocks, PROMPT_THREADS).with_shared(shared_bytes);
        let kernel = PROMPT_DIMS.iter().position(|dim| v.dim <= *dim).expect("a length taken");
        // SAFETY: as above.
        unsafe { stream.launch(self.prompt[kernel], grid, &part.params()) }
    }

    /// Adds up the partial results.
    fn combine(&self, stream: &Stream, part: AttentionLaunch) -> Result<()> {
        let AttentionLaunch { shape, data, .. } = part;
        let heads = data.records.map_or(1, |acts| heads_a_block(acts.kind, data.v.dim));
        let records = |kind: ActKind| {
            let own = data.records.filter(|acts| acts.kind == kind);
            DevicePtr::from(own.map(|acts| acts.records))
        };
        let params = CombineParams {
            work: data.work.into(),
            n_slots: u32_of(part.slots),
            split_len: u32_of(part.split_len),
            v_dim: u32_of(data.v.dim),
            first_token: u32_of(part.first),
            past: shape.past.into(),
            limit: shape.limit(part.n_ctx()),
            all: or_none(shape.all),
            window: or_none(shape.window),
            chunk: or_none(shape.chunk),
            sinks: shape.sinks.into(),
            out: data.out.into(),
            q8_0: records(ActKind::Q8_0),
            q8_k: records(ActKind::Q8_K),
            n_head: u32_of(shape.n_head),
            heads: u32_of(heads),
            lists: u32_of(shape.lists),
            unused: 0,
        };
        let blocks = [u32_of(shape.n_head / heads), u32_of(data.tokens), 1];
        // SAFETY: there is a record for each token, head and split, and the results fit (asserted).
        unsafe { stream.launch(self.combine, Grid::new(blocks, COMBINE_THREADS), &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_take_many_heads_unless_the_device_would_idle() {
        let load = Load {
            group: 8,
            k_dim: 128,
            pairs: 4,
            multiprocessors: 132,
            shared_bytes_max: 227 << 10,
        };
        // Four KV heads and one split: 32 blocks of a head are the most.
        assert_eq!(load.rows_a_block(), 1);
        assert_eq!(Load { pairs: 32, ..load }.rows_a_block(), 1);
        assert_eq!(Load { pairs: 34, ..load }.rows_a_block(), 2);
        assert_eq!(Load { pairs: 256, ..load }.rows_a_block(), 8);
        assert_eq!(Load { pairs: 256, group: 3, ..load }.rows_a_block(), 4);
        // Latent keys of 576 elements and 64 KiB.
        let turing =
            Load { pairs: 256, group: 128, k_dim: 576, shared_bytes_max: 64 << 10, ..load };
        assert_eq!(turing.rows_a_block(), 4);
        assert_eq!(Load { shared_bytes_max: 227 << 10, ..turing }.rows_a_block(), 16);
    }

    #[test]
    fn one_head_fits_every_device() {
        for k_dim in [1, 64, 256, 576] {
            assert!(shared_bytes(1, k_dim) <= 64 << 10, "{k_dim}");
        }
    }
}
