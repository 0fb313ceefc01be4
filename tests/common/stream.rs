//! Models whose experts are streamed, requests to them, and disks that are late, slow or broken.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use moeba::Result;
use moeba::engine::plan::ram::{Place, RamBudget};
use moeba::engine::{Engine, EngineOptions};
use moeba::experts::disk::{Faults, IoKind, Read};
use moeba::gguf::{TensorType, Writer};

use crate::{moeba, set_small_header, succeed};

/// The same weights, granule-major, in a file beside it.
pub fn granule_major(standard: &Path) -> PathBuf {
    let out = standard.with_extension("granule.gguf");
    succeed(moeba().arg("quantize").arg(standard).arg(&out).args(["copy", "--layout", "granule"]));
    out
}

/// io_uring where there is one: the tests pass where there is none.
pub fn uring() -> IoKind {
    match io_uring::IoUring::new(4) {
        Ok(_) => IoKind::Uring,
        Err(_) => IoKind::Pread,
    }
}

pub fn mixed(n: u64) -> u64 {
    let n = (n ^ (n >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (n ^ (n >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 17
}

pub fn tokens(n: usize, seed: u64) -> Vec<u32> {
    (0..n as u64).map(|i| 3 + (mixed(i + 1000 * seed + 1) % 250) as u32).collect()
}

// ---- a model whose experts have several granules ----

pub const WIDE_LAYERS: usize = 3;
pub const WIDE_EXPERTS: usize = 8;
const N_EMBD: u64 = 512;
/// 55 blocks of 32: no multiple of 256. A granule is 11 blocks of the largest experts.
const N_FF: u64 = 55 * 32;

/// Layers of different types, so that slots have several sizes. Experts of 1.5 to 2.9 MiB, of 2 to
/// 5 granules.
pub fn wide(dir: &Path) -> PathBuf {
    use TensorType::{F32, Q4_0, Q8_0};
    let path = dir.join("wide.gguf");
    let mut out = Writer::create(&path, None).unwrap();
    set_header(&mut out);
    let mut shapes: Vec<(String, Vec<u64>, TensorType)> = vec![
        ("token_embd".into(), vec![N_EMBD, 256], Q8_0),
        ("output_norm".into(), vec![N_EMBD], F32),
        ("output".into(), vec![N_EMBD, 256], Q8_0),
    ];
    for layer in 0..WIDE_LAYERS {
        let (gate, down) = [(Q8_0, Q8_0), (Q4_0, Q4_0), (Q8_0, Q4_0)][layer];
        let mut add = |name: &str, dims: &[u64], ty| {
            shapes.push((format!("blk.{layer}.{name}"), dims.to_vec(), ty));
        };
        add("attn_norm", &[N_EMBD], F32);
        add("attn_q", &[N_EMBD, 128], Q8_0);
        add("attn_k", &[N_EMBD, 64], Q8_0);
        add("attn_v", &[N_EMBD, 64], Q8_0);
        add("attn_q_norm", &[32], F32);
        add("attn_k_norm", &[32], F32);
        add("attn_output", &[128, N_EMBD], Q8_0);
        add("ffn_norm", &[N_EMBD], F32);
        add("ffn_gate_inp", &[N_EMBD, WIDE_EXPERTS as u64], F32);
        add("ffn_down_exps", &[N_FF, N_EMBD, WIDE_EXPERTS as u64], down);
        add("ffn_gate_exps", &[N_EMBD, N_FF, WIDE_EXPERTS as u64], gate);
        add("ffn_up_exps", &[N_EMBD, N_FF, WIDE_EXPERTS as u64], gate);
    }
    for (name, dims, ty) in &shapes {
        out.declare(&format!("{name}.weight"), dims, *ty).unwrap();
    }
    for (i, (name, dims, ty)) in shapes.iter().enumerate() {
        let bytes = random_weights(dims.iter().product(), *ty, name.contains("norm"), i as u64);
        out.write_tensor(&format!("{name}.weight"), &bytes).unwrap();
    }
    out.finish().unwrap();
    path
}

fn set_header(out: &mut Writer) {
    let numbers = [
        ("block_count", WIDE_LAYERS as u32),
        ("context_length", 256),
        ("embedding_length", N_EMBD as u32),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("expert_count", WIDE_EXPERTS as u32),
        ("expert_used_count", 2),
    ];
    set_small_header(out, &numbers);
}

/// Blocks of 32 begin with their scale; whatever follows is weights.
fn random_weights(n: u64, ty: TensorType, norm: bool, seed: u64) -> Vec<u8> {
    let random = |i: u64| mixed(i + (seed << 32) + 1);
    let block = match ty {
        TensorType::F32 => {
            let spread = |i| (random(i) & 0xffff) as f32 / 65536.0 - 0.5;
            let value = |i| if norm { 1.0 + spread(i) } else { spread(i) / 4.0 };
            return (0..n).flat_map(|i| value(i).to_le_bytes()).collect();
        }
        TensorType::Q8_0 => 34,
        _ => 18,
    };
    let mut bytes: Vec<u8> = (0..n / 32 * block).map(|i| random(i) as u8).collect();
    // f16: 2⁻¹¹ and 2⁻⁷, so that weights of both types lie within ±1/16.
    let scale = if block == 34 { 0x1000u16 } else { 0x2000 };
    bytes
        .chunks_exact_mut(block as usize)
        .for_each(|b| b[..2].copy_from_slice(&scale.to_le_bytes()));
    bytes
}

// ---- requests ----

/// Bits of the logits at all positions, and the chosen experts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub logits: Vec<u32>,
    pub experts: Vec<i32>,
}

/// A fresh session that is given `part` tokens a call.
pub fn ask(engine: &Arc<Engine>, tokens: &[u32], part: usize) -> Result<Answer> {
    let mut session = engine.new_session()?;
    session.record_experts(true);
    let mut logits = Vec::new();
    for tokens in tokens.chunks(part) {
        session.eval_all(tokens, &mut |_, l| {
            logits.extend(l.iter().map(|value| value.to_bits()));
        })?;
    }
    Ok(Answer { logits, experts: session.take_experts().ids })
}

/// The answer to the same request with the experts in place in the mapped file.
pub fn in_place(path: &Path, tokens: &[u32]) -> Answer {
    let options = EngineOptions { io: IoKind::Mmap, n_threads: Some(2), ..Default::default() };
    let engine = Engine::load(path, &options, &mut |_| ()).unwrap();
    assert_eq!(engine.plan().place, Place::InPlace);
    let answer = ask(&engine, tokens, usize::MAX).unwrap();
    // What is no number would equal itself, and what is all the same would prove nothing.
    let mut values = answer.logits.iter().map(|bits| f32::from_bits(*bits));
    assert!(values.all(f32::is_finite));
    assert!(answer.logits.iter().any(|bits| *bits != answer.logits[0]));
    answer
}

/// A budget that lies so far between the least and everything.
pub fn budget(path: &Path, share: f64) -> RamBudget {
    let options = EngineOptions { io: IoKind::Mmap, ..Default::default() };
    let sizes = Engine::plan_of(path, &options).unwrap().sizes;
    let spare = sizes.slot_bytes.saturating_sub(sizes.minimum_bytes);
    RamBudget::Bytes(sizes.minimum_bytes + (spare as f64 * share) as u64)
}

pub fn load(path: &Path, options: &EngineOptions) -> Arc<Engine> {
    let engine = Engine::load(path, options, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"));
    assert!(matches!(engine.plan().place, Place::Streamed { .. }), "{options:?}");
    engine
}

/// The engine comes to rest, no invariant is broken, and the budget was kept.
#[track_caller]
pub fn expect_rest(engine: &Engine) {
    let since = Instant::now();
    while !engine.model().hierarchy().check_integrity() {
        assert!(since.elapsed() < Duration::from_secs(10), "the experts do not come to rest");
        std::thread::sleep(Duration::from_millis(1));
    }
    let Place::Streamed { budget } = engine.plan().place else { panic!("in place") };
    let counters = engine.expert_counters().unwrap();
    assert!(counters.resident_bytes <= counters.resident_bytes_max);
    assert!(counters.resident_bytes_max <= budget, "{counters:?} exceed {budget}");
    assert!(counters.resident_bytes_max > 0 || counters.n_reads == 0, "{counters:?}");
}

// ---- disks ----

/// A disk with faults that can be switched while it is read. All are off at first.
#[derive(Debug, Default)]
pub struct Disk {
    pub seed: u64,
    /// Each read is held back by less than so many µs, at random.
    pub jitter_us: AtomicU64,
    /// Every read is held back by so much.
    pub slow_ms: AtomicU64,
    /// One offset in so many is bad.
    pub bad_one_in: AtomicU64,
    /// So many reads of a bad offset fail, and then none.
    pub bad_times: AtomicU64,
    failed: Mutex<HashMap<u64, u64>>,
}

impl Disk {
    pub fn late(seed: u64, jitter_us: u64) -> Arc<Disk> {
        Arc::new(Disk { seed, jitter_us: jitter_us.into(), ..Disk::default() })
    }

    pub fn slow(slow_ms: u64) -> Arc<Disk> {
        Arc::new(Disk { slow_ms: slow_ms.into(), ..Disk::default() })
    }

    pub fn bad(seed: u64, one_in: u64, times: u64) -> Arc<Disk> {
        let (bad_one_in, bad_times) = (one_in.into(), times.into());
        Arc::new(Disk { seed, bad_one_in, bad_times, ..Disk::default() })
    }

    pub fn mend(&self) {
        [&self.jitter_us, &self.slow_ms, &self.bad_one_in].iter().for_each(|f| f.store(0, SeqCst));
    }

    pub fn n_failed(&self) -> u64 {
        self.failed.lock().unwrap().values().sum()
    }
}

impl Faults for Disk {
    fn before(&self, read: &Read) -> Duration {
        let at_random = mixed(self.seed ^ (read.offset + u64::from(read.id)));
        let jitter = at_random % self.jitter_us.load(SeqCst).max(1);
        Duration::from_millis(self.slow_ms.load(SeqCst)) + Duration::from_micros(jitter)
    }

    fn after(&self, read: &Read, result: io::Result<usize>) -> io::Result<usize> {
        let one_in = self.bad_one_in.load(SeqCst);
        if one_in == 0 || !mixed(self.seed ^ read.offset).is_multiple_of(one_in) {
            return result;
        }
        let mut failed = self.failed.lock().unwrap();
        let n = failed.entry(read.offset).or_default();
        if *n >= self.bad_times.load(SeqCst) {
            return result;
        }
        *n += 1;
        Err(io::Error::from_raw_os_error(libc::EIO))
    }
}
