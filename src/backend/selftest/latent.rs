//! Keys and values of latent attention's heads, and attention among them a part at a time. The CPU
//! does not make them, so they are compared with sums of f64.

use super::operands::Cached;
use super::{Bench, Random, try_map};
use crate::Result;
use crate::backend::gpu::DeviceBuffer;
use crate::backend::gpu::attention::{Attention, AttentionData, DeviceAttention};
use crate::backend::gpu::cache::DeviceRows;
use crate::backend::gpu::heads::DeviceHeadMats;
use crate::backend::gpu::latent::{Expand, LatentRows};
use crate::backend::gpu::mat::DeviceMat;
use crate::gguf::TensorType::{self, F16, F32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::quant;

const TYPES: [TensorType; 7] = [F16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL];

/// Parts of the largest value. Weights and results are rounded to f16, each by up to 5·10⁻⁴;
/// attention rounds queries and exponentials besides.
const EXPAND_BOUND: f64 = 1e-3;
const PIECES_BOUND: f64 = 3e-3;

/// Heads, elements of the compressed part, of the rotated one, of the rest of a key and of a value,
/// positions, and the first that is taken.
type Shape = [usize; 7];

pub fn check(bench: &Bench) -> Result<()> {
    let (keys, attention) = (Expand::load(&bench.gpu)?, Attention::load(&bench.gpu)?);
    let odd = [[2, 24, 40, 8, 136, 5, 0], [1, 72, 24, 200, 72, 131, 3]];
    let large = [[16, 512, 64, 128, 128, 700, 60], [8, 512, 64, 192, 256, 300, 0]];
    let shapes = bench.shapes(&[[2, 64, 32, 16, 24, 11, 1]], &odd, &large);
    for ty in TYPES {
        bench.each("expand", ty, &shapes, |shape| expand(bench, &keys, ty, *shape));
    }
    let odd = [[130, 3, 40, 200], [7, 150, 64, 200], [140, 70, 64, 50]];
    let large = [[3000, 300, 1024, 4000], [3000, 300, 1024, 512]];
    let shapes = bench.shapes(&[[70, 30, 64, 100], [70, 30, 64, 9]], &odd, &large);
    bench.each("attention_pieces", F16, shapes, |shape| in_pieces(bench, &attention, shape));
    Ok(())
}

/// Σ a·b, as f64.
fn dot(a: impl Iterator<Item = f32>, b: impl Iterator<Item = f32>) -> f32 {
    a.zip(b).map(|(a, b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32
}

fn halves(bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / 2];
    quant::dequantize(F16, bytes, &mut values);
    values
}

fn half_rows(buffer: &DeviceBuffer, heads: usize, dim: usize, n_ctx: usize) -> DeviceRows<'_> {
    DeviceRows { ty: F16, data: buffer.all(), heads, dim, stride: dim, n_ctx }
}

fn expand(bench: &Bench, expand: &Expand, ty: TensorType, shape: Shape) -> Result<()> {
    let [n_heads, rank, n_rot, nope, n_value, n_ctx, begin] = shape;
    let (mut random, dim) = (Random(rank as u64), rank + n_rot);
    if !dim.is_multiple_of(ty.block_len()) {
        return Ok(());
    }
    // A cache, and its rows as f32.
    let mut rows = random.floats(n_ctx * dim);
    let cached = Cached::new(bench, ty, [1, n_ctx, dim], &rows, 0);
    quant::dequantize(ty, &cached.bytes, &mut rows);
    let rows = &rows[begin * dim..];
    let data = bench.up(cached.bytes.to_vec())?;
    let (from, range) = (LatentRows { rows: cached.at(&data.device), rank }, begin..n_ctx);
    for is_keys in [true, false] {
        let (n_cols, n_mat, cols) =
            if is_keys { (nope, rank, nope) } else { (n_value, n_value, rank) };
        // Rows before the first head's, and behind each.
        let (first, step) = (2, n_mat + 1);
        let n_rows = first + n_heads * step;
        let [weights] = bench.floats(&mut random, [n_rows * cols])?;
        let mut expected = Vec::new();
        for (h, row) in (0..n_heads).flat_map(|h| rows.chunks_exact(dim).map(move |r| (h, r))) {
            let mat = &weights[(first + h * step) * cols..];
            let c = || row[..rank].iter().copied();
            let element = |i: usize| match is_keys {
                true => dot((0..rank).map(|r| mat[r * cols + i]), c()),
                false => dot(mat[i * cols..][..rank].iter().copied(), c()),
            };
            expected.extend((0..n_cols).map(element));
            expected.extend(is_keys.then_some(&row[rank..]).into_iter().flatten());
        }
        let (dim, n) = (if is_keys { nope + n_rot } else { n_value }, n_ctx - begin);
        let out = bench.empty(2 * n_heads * n * dim)?;
        let to = half_rows(&out, n_heads, dim, n);
        let all = DeviceMat::dense(F32, weights.gpu(), n_rows, cols);
        let mats = DeviceHeadMats { all, n_heads, rows: n_mat, first, step };
        match is_keys {
            true => expand.keys(&bench.stream, from, range.clone(), mats, to)?,
            false => expand.values(&bench.stream, from, range.clone(), mats, to)?,
        }
        let name = format!("{n_heads}×{dim} of {rank}, {n} rows");
        bench.near(name, &halves(&bench.down(&out)?), &expected, EXPAND_BOUND)?;
    }
    Ok(())
}

/// Attention of `tokens` behind `past` to the last `window` positions, among rows that are there
/// `len` at a time, against all at once.
fn in_pieces(
    bench: &Bench,
    attention: &Attention,
    [past, tokens, len, window]: [usize; 4],
) -> Result<()> {
    let (n_head, k_dim, v_dim, n_ctx) = (3, 40, 24, past + tokens);
    let mut random = Random(past as u64);
    let mut up = |n: usize| {
        let mut bytes = vec![0; 2 * n];
        quant::quantize(F16, &random.floats(n), &mut bytes);
        bench.up(bytes)
    };
    let (k, v) = (up(n_head * n_ctx * k_dim)?, up(n_head * n_ctx * v_dim)?);
    let [q, sinks] = bench.floats(&mut random, [tokens * n_head * k_dim, n_head])?;
    let first = bench.word(past)?;
    let outs = try_map([4 * tokens * n_head * v_dim; 2], |bytes| bench.empty(bytes))?;
    let shape = DeviceAttention {
        n_head,
        n_head_kv: n_head,
        past: first.gpu(),
        max_seen: n_ctx,
        all: None,
        window: (window < n_ctx).then_some(window),
        chunk: None,
        scale: 0.2,
        cap: None,
        sinks: Some(sinks.gpu()),
        bias: None,
        prompt: true,
        lists: 0,
    };
    let n_work = Attention::work_bytes(n_head, v_dim, n_ctx, tokens);
    let work = bench.empty(n_work.max(Attention::piece_work_bytes(n_head, v_dim, tokens)))?;
    let data = AttentionData {
        tokens,
        q: q.gpu(),
        k: half_rows(&k.device, n_head, k_dim, n_ctx),
        v: half_rows(&v.device, n_head, v_dim, n_ctx),
        work: work.all(),
        out: outs[0].all(),
        records: None,
    };
    attention.launch(&bench.stream, &shape, data)?;
    let first = (past + 1).saturating_sub(window) / len * len;
    for begin in (first..n_ctx).step_by(len) {
        // As many rows of each head, one head's behind the other's.
        let cut = |all: &[u8], dim: usize| {
            let mut piece = vec![0xff; 2 * n_head * len * dim];
            let n = len.min(n_ctx - begin);
            for (h, head) in piece.chunks_exact_mut(2 * len * dim).enumerate() {
                let from = 2 * (h * n_ctx + begin) * dim;
                head[..2 * n * dim].copy_from_slice(&all[from..][..2 * n * dim]);
            }
            bench.up(piece)
        };
        let (k, v) = (cut(&k, k_dim)?, cut(&v, v_dim)?);
        let k = half_rows(&k.device, n_head, k_dim, len);
        let v = half_rows(&v.device, n_head, v_dim, len);
        let data = AttentionData { k, v, out: outs[1].all(), ..data };
        attention.launch_piece(&bench.stream, &shape, data, begin)?;
        bench.stream.synchronize()?;
    }
    let [expected, got] = try_map(outs, |out| bench.down(&out))?;
    let name = format!("{tokens} after {past}, {len} at a time, a window of {window}");
    bench.near(name, &got, &expected, PIECES_BOUND)
}
