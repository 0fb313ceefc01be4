//! Missed experts that kernels read in the host's memory: the same bits, and only where they can
//! be read.

use crate::support::at_rest;
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::{Config, Faults};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{
    BatchRow, DeviceChoice, Engine, EngineOptions, Logits, Phase, TestHooks, Want,
};
use moeba::experts::disk::IoKind;
use moeba::forward::gpu::InPlace;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A model whose experts are in slots of RAM, and some of them in VRAM.
fn options(config: Config, ram: RamBudget, in_place: InPlace) -> EngineOptions {
    let test = TestHooks { in_place: Some(in_place), ..Default::default() };
    let (device, vram) = (DeviceChoice::Emulated(config), "40%".parse().unwrap());
    EngineOptions { device, vram, ram, io: IoKind::Pread, test, ..on_cpu() }
}

fn on_cpu() -> EngineOptions {
    EngineOptions { n_ctx: Some(32), exact: true, ..golden_options() }
}

fn config(seed: u64) -> Config {
    Config { seed, ..Config::default() }
}

/// Bits of the logits of a text's tokens, and of two texts whose rows choose the same experts.
fn decode(engine: &Arc<Engine>) -> Vec<u32> {
    let (mut one, mut out) = (engine.new_session().unwrap(), Vec::new());
    for token in [3, 40, 77, 24, 90] {
        out.extend_from_slice(one.eval(&[token], Want::Last).unwrap().all());
    }
    let mut two = [(); 2].map(|()| engine.new_session().unwrap());
    for token in [5, 60] {
        let token = [token];
        let (tokens, phase, want) = (&token[..], Phase::Decode, Want::Last);
        let rows = two.iter_mut().map(|session| BatchRow { session, tokens, phase, want });
        engine.eval_batch(&mut rows.collect::<Vec<_>>()).unwrap();
        for session in &mut two {
            let Logits::All(logits) = session.logits() else { panic!("all were wanted") };
            out.extend_from_slice(logits);
        }
    }
    drop((one, two));
    at_rest(engine, Duration::from_secs(20));
    out.iter().map(|logit| logit.to_bits()).collect()
}

fn n_in_place(engine: &Engine) -> usize {
    engine.graph_counts().unwrap().n_in_place
}

fn is_there(path: &std::path::Path) -> bool {
    match Engine::plan_of(path, &options(config(0), "100%".parse().unwrap(), InPlace::Never)) {
        Ok(_) => true,
        Err(why) if why.to_string().contains("C++") => false,
        Err(why) => panic!("{why}"),
    }
}

/// With biases and without, in one granule and in several; in the least RAM too, where the CPU
/// does what is not there.
#[test]
fn what_is_read_in_place_has_the_bits_of_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["qwen3moe", "gpt_oss", "deepseek_v3"] {
        let path = convert_golden(name, "q8_0", dir.path());
        if !is_there(&path) {
            return;
        }
        let expected = decode(&load(&path, &on_cpu()));
        let all: RamBudget = "100%".parse().unwrap();
        let engine = load(&path, &options(config(1), all, InPlace::Always));
        let least = RamBudget::Bytes(engine.plan().sizes.minimum_bytes);
        let start = Instant::now();
        // The RAM tier is pinned and filled meanwhile.
        while n_in_place(&engine) < 10 {
            assert!(decode(&engine) == expected, "{name}");
            assert!(start.elapsed() < Duration::from_secs(60), "{name}: nothing is read in place");
        }
        for (seed, in_place) in [(2, InPlace::Always), (3, InPlace::IfFaster)] {
            let engine = load(&path, &options(config(seed), least, in_place));
            assert!(decode(&engine) == expected, "{name}, in the least RAM, {in_place:?}");
        }
    }
}

/// Nothing is, if the memory could not be pinned, experts lie in the mapped file, or the user says
/// so.
#[test]
fn nothing_is_read_in_place_that_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "q8_0", dir.path());
    if !is_there(&path) {
        return;
    }
    let expected = decode(&load(&path, &on_cpu()));
    let all: RamBudget = "100%".parse().unwrap();
    let unpinned = Faults { register_from: Some(0), ..Faults::default() };
    let unpinned = Config { faults: unpinned, ..config(4) };
    let mapped = EngineOptions { io: IoKind::Auto, ..options(config(4), all, InPlace::Always) };
    for (what, options) in [
        ("not pinned", options(unpinned, all, InPlace::Always)),
        ("in the file", mapped),
        ("never", options(config(4), all, InPlace::Never)),
    ] {
        let engine = load(&path, &options);
        for _ in 0..2 {
            assert!(decode(&engine) == expected, "{what}");
        }
        assert_eq!(n_in_place(&engine), 0, "{what}");
    }
}
