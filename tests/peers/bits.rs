//! Logits with peers are those without, bit for bit, on every golden model that has experts.

use std::path::Path;
use std::sync::Arc;

use common::stream::{Answer, expect_rest, tokens, wide};
use common::{cards, convert_golden, repo};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{Engine, EngineOptions, PeerCounters, Pooling};
use moeba::experts::disk::IoKind;

use crate::support::{answer, expected, head, head_options, least, peer, wait_for};

/// The checkpoints in `tests/golden`.
fn golden() -> Vec<String> {
    let folders = std::fs::read_dir(repo().join("tests/golden")).unwrap();
    let folders = folders.map(|entry| entry.unwrap().path());
    let folders = folders.filter(|path| path.join("expect").is_dir());
    let mut names: Vec<String> =
        folders.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// Bits of the logits of a text; with an encoder, of a target behind a source; of outputs where
/// there are no logits.
fn logits(engine: &Arc<Engine>, tokens: &[u32]) -> Answer {
    if engine.only_embeds() {
        let outputs = engine.new_session().unwrap().embed(tokens, Pooling::None).unwrap();
        let logits = outputs.values.iter().map(|x| x.to_bits()).collect();
        return Answer { logits, experts: Vec::new() };
    }
    if engine.encoder().is_none() {
        return answer(engine, tokens, 4).unwrap();
    }
    let mut session = engine.new_session().unwrap();
    session.encode(&tokens[..12]).unwrap();
    let mut logits = Vec::new();
    for part in [&tokens[..6], &tokens[6..7], &tokens[7..8]] {
        session.eval_all(part, &mut |_, l| logits.extend(l.iter().map(|l| l.to_bits()))).unwrap();
    }
    Answer { logits, experts: Vec::new() }
}

/// Peers have computed, and were not just asked: on a busy machine one may be late.
fn expect_work(counters: &PeerCounters, name: &str) {
    let done = counters.experts - counters.lost;
    assert!(done > 0 && 4 * done >= 3 * counters.experts, "{name}: {counters:?}");
}

/// Whether the model has experts, and peers have computed some of them.
fn agrees(name: &str, outtype: &str, dir: &Path) -> bool {
    let path = convert_golden(name, outtype, dir);
    let options = EngineOptions { io: IoKind::Mmap, ..Default::default() };
    if Engine::plan_of(&path, &options).unwrap().sizes.expert_bytes == 0 {
        return false;
    }
    let alone = common::load(&path, &EngineOptions { n_threads: Some(2), ..options });
    let n_ids = alone.n_vocab().min(200) as u32;
    let tokens: Vec<u32> = tokens(18, 3).iter().map(|token| token % n_ids).collect();
    let expected = logits(&alone, &tokens);
    assert!(expected.logits.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{name}");
    let peers = [peer(&path, least(&path)), peer(&path, RamBudget::Auto)];
    let engine = head(&path, &[&peers[0].url, &peers[1].url]);
    wait_for(&engine, 2);
    for round in 0..2 {
        assert!(logits(&engine, &tokens) == expected, "{name} {outtype}, round {round}");
    }
    let counters = engine.peer_counters().unwrap();
    expect_work(&counters, name);
    expect_rest(&engine);
    true
}

#[test]
fn every_golden_model_with_two_peers() {
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<String> = golden().into_iter().chain(cards::names()).collect();
    let n = names.iter().filter(|name| agrees(name, "f32", dir.path())).count();
    assert!(n >= 35, "only {n} of {} models have experts", names.len());
}

/// Activations travel as Q8_0 and as Q8_K blocks, too.
#[test]
fn quantised_experts() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["deepseek_v3", "gpt_oss", "llama4_hf", "phimoe", "qwen2moe", "qwen3moe_mixed"] {
        assert!(agrees(name, "q8_0", dir.path()), "{name}");
    }
    let demo = repo().join("models/demo/moeba-demo.gguf");
    let tokens = tokens(40, 5);
    let expected = expected(&demo, &tokens);
    let peers = [(); 3].map(|()| peer(&demo, "25%".parse().unwrap()));
    let urls: Vec<&str> = peers.iter().map(|peer| &*peer.url).collect();
    let engine = head(&demo, &urls);
    assert!(answer(&engine, &tokens, 12).unwrap() == expected, "the demo model");
    expect_work(&engine.peer_counters().unwrap(), "the demo model");
}

/// Experts of several granules; the head has room for some of them, and takes turns with its own
/// policy, prefetch and several threads.
#[test]
fn a_head_with_any_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = wide(dir.path());
    let tokens = tokens(40, 9);
    let expected = expected(&path, &tokens);
    let peers = [peer(&path, least(&path)), peer(&path, RamBudget::Auto)];
    let urls = [&*peers[0].url, &*peers[1].url];
    for (share, policy, n_threads) in
        [(0.0, "finemoe", 2), (0.3, "on-demand", 1), (0.6, "mixtral-offloading", 2)]
    {
        let options = EngineOptions {
            ram: common::stream::budget(&path, share),
            policy: policy.parse().unwrap(),
            n_threads: Some(n_threads),
            ..head_options(&path, &urls)
        };
        let engine = common::stream::load(&path, &options);
        for n_decode in [0, 8, 40] {
            let n_decode = n_decode.min(tokens.len() - 1);
            let got = answer(&engine, &tokens, n_decode).unwrap();
            assert!(got == expected, "{share} {policy} {n_threads} {n_decode}");
        }
        expect_work(&engine.peer_counters().unwrap(), policy);
        expect_rest(&engine);
    }
}

/// With all experts in memory peers have nothing to do, and are not even asked.
#[test]
fn a_head_with_all_in_memory_asks_no_peer() {
    let demo = repo().join("models/demo/moeba-demo.gguf");
    let options = EngineOptions {
        ram: RamBudget::Auto,
        io: IoKind::Auto,
        ..head_options(&demo, &["http://127.0.0.1:9"])
    };
    let engine = common::load(&demo, &options);
    assert!(engine.peer_counters().is_none());
}
