//! Devices whose streams share few hardware queues. A copy or a kernel that stands behind a wait
//! for the host holds up what ends the wait: the emulated device sees that, and no order of the
//! engine's does it.

use crate::support::words;
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::{Config, ProbeParams, Queues};
use moeba::backend::gpu::{
    Device, DeviceBuffer, Emulated, Event, Grid, Kernel, Pinned, PinnedKind, Stream,
};
use moeba::engine::{DeviceChoice, Engine, EngineOptions, TestHooks, Want};
use moeba::{Error, Result};
use std::path::Path;
use std::sync::Arc;

fn device(queues: Queues, seed: u64) -> Device {
    Emulated::devices(&Config { seed, queues, ..Config::default() }).swap_remove(0)
}

/// Adds up the words of `from`.
fn sum(kernel: Kernel<ProbeParams>, stream: &Stream, from: &DeviceBuffer, to: &DeviceBuffer) {
    let (a, out) = (from.all().into(), to.all().into());
    let params = ProbeParams { a, out, n: 4, ..Default::default() };
    // SAFETY: the emulated device checks accesses.
    unsafe { stream.launch(kernel, Grid::new([1; 3], 32).with_shared(64), &params) }.unwrap();
}

/// The operations with which the host ends a wait, on a stream of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Answer {
    /// A copy up of a part, then a copy of the word.
    Copies,
    /// A kernel, then a write of the word in mapped memory.
    Kernel,
    /// A write of the word alone.
    Write,
}

/// A layer's stream waits for the host. The next layer's copies, or kernels alone, stand behind the
/// wait before the host answers. Returns why the layer's stream does not end, if it does not.
fn layer(gpu: &Device, answer: Answer, copies_behind: bool) -> Result<Option<String>> {
    let (main, late) = (Stream::new(gpu)?, Stream::new(gpu)?);
    let kernel = Kernel::find(gpu, "probe_sum")?;
    let (x, part, total) = (words(&main, &[1; 4]), words(&main, &[0; 4]), words(&main, &[0]));
    let (go, up) = (words(&main, &[0]), Pinned::new(gpu, 64, PinnedKind::Cached)?);
    let mapped = Pinned::new(gpu, 4, PinnedKind::Mapped)?;
    mapped.store_word(0, 0);
    // SAFETY: nothing is queued that uses it.
    unsafe { up.bytes_mut(0..64) }.fill(1);
    let routed = Event::new(gpu)?;
    main.record(&routed)?;
    let word = if answer == Answer::Copies { go.all() } else { mapped.slice(0..4) };
    let waiting = main.wait_value(word, 1)?;
    sum(kernel, &main, &x, &total);
    if copies_behind {
        // SAFETY: not changed before the end, where dropping it waits.
        unsafe { main.upload(x.all(), up.bytes(0..16))? };
    }
    routed.synchronize()?;
    match answer {
        Answer::Copies => {
            // SAFETY: as above.
            unsafe { late.upload(part.all(), up.bytes(16..32))? };
            // SAFETY: as above.
            unsafe { late.upload(go.all(), up.bytes(32..36))? };
        }
        Answer::Kernel => {
            sum(kernel, &late, &x, &part);
            late.write_value(word, 1)?;
        }
        Answer::Write => late.write_value(word, 1)?,
    }
    let why = match main.synchronize_watched() {
        Ok(()) => None,
        Err(Error::Device(why)) => Some(why),
        Err(other) => return Err(other),
    };
    if why.is_some() {
        // The host releases the device, so that the rest can end.
        match answer {
            Answer::Copies => gpu_word(gpu, &go)?,
            _ => mapped.store_word(0, 1),
        }
    }
    drop(waiting);
    Ok(why)
}

/// Writes 1 to a word by a stream that stands behind nothing.
fn gpu_word(gpu: &Device, word: &DeviceBuffer) -> Result<()> {
    Stream::new(gpu)?.write_value(word.all(), 1)
}

#[test]
fn what_stands_behind_a_wait_hangs_on_shared_queues_and_is_told() {
    for seed in 0..6 {
        for queues in Queues::ALL {
            for answer in [Answer::Copies, Answer::Kernel, Answer::Write] {
                for copies_behind in [false, true] {
                    let hangs = match answer {
                        Answer::Copies => copies_behind && queues != Queues::OfStreams,
                        Answer::Kernel => queues == Queues::One,
                        Answer::Write => false,
                    };
                    let why = layer(&device(queues, seed), answer, copies_behind).unwrap();
                    let what = format!("{queues:?}, {answer:?}, {copies_behind}, seed {seed}");
                    assert_eq!(why.is_some(), hangs, "{what}: {why:?}");
                    if let Some(why) = why {
                        assert!(why.contains("stands behind the wait in a queue"), "{what}: {why}");
                        assert!(why.contains("MOEBA_GPU_WAITS=0"), "{what}: {why}");
                    }
                }
            }
        }
    }
}

fn options(queues: Queues, waits: Option<bool>, cpu_share: f32, vram: &str) -> EngineOptions {
    let device = DeviceChoice::Emulated(Config { seed: 3, queues, waits, ..Config::default() });
    let test = TestHooks { cpu_share: Some(cpu_share), ..Default::default() };
    let vram = vram.parse().unwrap();
    EngineOptions { device, vram, test, n_ctx: Some(32), ..golden_options() }
}

/// Bits of the logits of tokens decoded one by one.
fn decode(engine: &Arc<Engine>) -> Result<Vec<u32>> {
    let mut session = engine.new_session()?;
    let mut out = Vec::new();
    for token in [3, 40, 77, 24] {
        out.extend(session.eval(&[token], Want::Last)?.all().iter().map(|v| v.to_bits()));
    }
    Ok(out)
}

fn model(dir: &Path) -> Option<std::path::PathBuf> {
    let path = convert_golden("qwen3moe", "q8_0", dir);
    match Engine::plan_of(&path, &options(Queues::OfStreams, None, 0.0, "60%")) {
        Ok(_) => Some(path),
        Err(why) if why.to_string().contains("C++") => None,
        Err(why) => panic!("{why}"),
    }
}

#[test]
fn decode_has_the_same_bits_on_any_queues_with_and_without_waits() {
    let dir = tempfile::tempdir().unwrap();
    let Some(path) = model(dir.path()) else { return };
    let all = load(&path, &options(Queues::OfStreams, None, 0.0, "100%"));
    let expected = decode(&all).unwrap();
    for queues in Queues::ALL {
        for waits in [None, Some(false)] {
            for cpu_share in [0.0, 0.5, 1.0] {
                let engine = load(&path, &options(queues, waits, cpu_share, "40%"));
                let got = decode(&engine).unwrap();
                assert!(got == expected, "{queues:?}, {waits:?}, {cpu_share}");
            }
        }
    }
}

/// On a single queue, kernels of missed experts stand behind the wait for them. The engine would
/// not wait there by itself.
#[test]
fn a_decode_that_hangs_ends_in_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let Some(path) = model(dir.path()) else { return };
    let engine = load(&path, &options(Queues::One, Some(true), 0.0, "40%"));
    let why = decode(&engine).unwrap_err().to_string();
    assert!(why.contains("MOEBA_GPU_WAITS=0"), "{why}");
}
