//! Encoder–decoder models: tiny random checkpoints, converted by moeba, against what transformers
//! computes on them in float32 (`tests/golden/README.md`), in place and streamed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{Npy, argmax, golden_options as options, load};
use moeba::engine::plan::ram::{Place, RamBudget};
use moeba::engine::{Engine, EngineOptions, Experts, Want};
use moeba::experts::disk::IoKind;
use moeba::gguf::{Gguf, OwnedValue, Writer};

const PROMPTS: [&str; 3] = ["p5", "p17", "p70"];
const NAMES: [&str; 3] = ["switch", "switch_tied", "nllb_moe"];

/// One of the files beside a checkpoint.
fn expected(name: &str, file: &str) -> PathBuf {
    common::repo().join("tests/golden").join(name).join("expect").join(file)
}

fn read_ids(name: &str, file: &str) -> Vec<u32> {
    common::read_ids(&expected(name, file))
}

/// Logits of all of the decoder's tokens, handed over `step` at once; experts of both stacks.
struct Answer {
    logits: Vec<f32>,
    encoder: Experts,
    decoder: Experts,
}

fn answer(engine: &Arc<Engine>, source: &[u32], target: &[u32], step: usize) -> Answer {
    let mut session = engine.new_session().unwrap();
    session.record_experts(true);
    session.encode(source).unwrap();
    let encoder = session.take_experts();
    let mut logits = Vec::new();
    for part in target.chunks(step) {
        session.eval_all(part, &mut |_, l| logits.extend_from_slice(l)).unwrap();
    }
    assert_eq!(session.n_past(), target.len());
    Answer { logits, encoder, decoder: session.take_experts() }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|l| l.to_bits()).collect()
}

fn check_experts(name: &str, file: &str, got: &Experts) {
    let wanted = Npy::read(&expected(name, file));
    assert_eq!(wanted.shape, [got.layers, got.tokens, got.k], "{name} {file}");
    assert_eq!(wanted.i32s(), got.ids, "{name} {file}");
}

/// Logits, top-1 and experts of every layer at 32 decoder positions; the greedy continuation.
fn agrees_with_transformers(name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let engine = load(&common::convert_golden(name, "f32", dir.path()), &options());
    for prompt in PROMPTS {
        let source = read_ids(name, &format!("{prompt}.tokens.json"));
        let target = read_ids(name, &format!("{prompt}.decoder_tokens.json"));
        let wanted = Npy::read(&expected(name, &format!("{prompt}.logits.npy")));
        assert_eq!(wanted.shape, [32, engine.n_vocab()], "{name} {prompt}");
        let wanted = wanted.f32s();
        let got = answer(&engine, &source, &target, target.len());
        let largest = wanted.iter().fold(0f32, |m, v| m.max(v.abs()));
        let off = got.logits.iter().zip(&wanted).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(off < 1e-3 * largest, "{name} {prompt}: off by {off} of {largest}");
        let rows = got.logits.chunks(engine.n_vocab()).zip(wanted.chunks(engine.n_vocab()));
        for (t, (a, b)) in rows.enumerate() {
            assert_eq!(argmax(a), argmax(b), "{name} {prompt}: best token at position {t}");
        }
        check_experts(name, &format!("{prompt}.encoder_experts.npy"), &got.encoder);
        check_experts(name, &format!("{prompt}.decoder_experts.npy"), &got.decoder);
        let greedy = read_ids(name, &format!("{prompt}.greedy.json"));
        // A translation begins with its language.
        let n_start = 1 + usize::from(engine.tokenizer().source_language().is_some());
        assert_eq!(target[0], engine.encoder().expect("an encoder").start);
        let said = continuation(&engine, &source, &target[..n_start], greedy.len());
        // The reference does not count padding among positions; here it is a token like any other.
        let pad = engine.tokenizer().special().pad;
        let n = greedy.iter().position(|id| Some(*id) == pad).map_or(greedy.len(), |at| at + 1);
        assert_eq!(said[..n], greedy[..n], "{name} {prompt}: greedy");
    }
}

fn continuation(engine: &Arc<Engine>, source: &[u32], start: &[u32], n: usize) -> Vec<u32> {
    let mut session = engine.new_session().unwrap();
    session.encode(source).unwrap();
    let (mut out, mut feed) = (Vec::new(), start.to_vec());
    while out.len() < n {
        let next = argmax(session.eval(&feed, Want::Last).unwrap().all()) as u32;
        out.push(next);
        feed = vec![next];
    }
    out
}

#[test]
fn switch() {
    agrees_with_transformers("switch");
}

#[test]
fn switch_tied() {
    agrees_with_transformers("switch_tied");
}

#[test]
fn nllb_moe() {
    agrees_with_transformers("nllb_moe");
}

/// Promise 1: budgets and threads change no bit, nor do steps of the decoder where no expert is
/// full.
#[test]
fn bits_do_not_depend_on_budget_threads_or_steps() {
    let dir = tempfile::tempdir().unwrap();
    for (name, mix) in NAMES.iter().flat_map(|name| [(name, "f32"), (name, "q8_0")]) {
        let path = common::convert_golden(name, mix, dir.path());
        let source = read_ids(name, "p70.tokens.json");
        let target = read_ids(name, "p70.decoder_tokens.json");
        let way = |share: Option<f64>, n_threads: usize, step: usize| {
            let streamed = share.map(|share| (IoKind::Pread, budget(&path, share)));
            let (io, ram) = streamed.unwrap_or((IoKind::Mmap, RamBudget::Auto));
            let options = EngineOptions { io, ram, n_threads: Some(n_threads), ..options() };
            let engine = load(&path, &options);
            assert_eq!(engine.plan().place == Place::InPlace, share.is_none());
            let got = answer(&engine, &source, &target, step);
            engine.model().hierarchy().check_integrity();
            (bits(&got.logits), got.encoder, got.decoder)
        };
        let expected = way(None, 1, 32);
        let ways = [(Some(0.0), 1, 32), (Some(0.3), 2, 1), (Some(1.0), 3, 7), (None, 3, 1)];
        for (share, n_threads, step) in ways {
            let got = way(share, n_threads, step);
            let what = format!("{name} {mix}: budget {share:?} -t {n_threads}, {step} at once");
            assert!(got.0 == expected.0, "{what}: other logits");
            assert_eq!((&got.1, &got.2), (&expected.1, &expected.2), "{what}: other experts");
        }
    }
}

/// A budget that lies so far between the least and everything.
fn budget(path: &Path, share: f64) -> RamBudget {
    let options = EngineOptions { io: IoKind::Mmap, ..Default::default() };
    let sizes = Engine::plan_of(path, &options).unwrap().sizes;
    let spare = sizes.slot_bytes.saturating_sub(sizes.minimum_bytes);
    RamBudget::Bytes(sizes.minimum_bytes + (spare as f64 * share) as u64)
}

/// A file without one of its tensors, or without one of its keys.
fn without(source: &Path, missing: &str) -> PathBuf {
    let gguf = Gguf::open(source).unwrap();
    let path = source.with_file_name(format!("without {missing}"));
    let mut out = Writer::create(&path, None).unwrap();
    for (key, value) in gguf.keys().filter(|(key, _)| *key != missing) {
        out.set(key, OwnedValue::from(value)).unwrap();
    }
    for t in gguf.tensors().iter().filter(|t| t.name != missing) {
        out.declare(&t.name, &t.dims, t.ty).unwrap();
    }
    for t in gguf.tensors().iter().filter(|t| t.name != missing) {
        out.write_tensor(&t.name, gguf.bytes(t)).unwrap();
    }
    out.finish().unwrap();
    path
}

#[test]
fn what_a_file_lacks_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let lacks = |file: &Path, missing: &str| {
        let loaded = Engine::load(&without(file, missing), &options(), &mut |_| ());
        let error = loaded.err().unwrap_or_else(|| panic!("{missing} is not missed")).to_string();
        assert!(error.contains(&format!("without {missing}: {missing}")), "{error}");
    };
    let switch = common::convert_golden("switch", "f32", dir.path());
    for missing in [
        "enc.blk.0.attn_rel_b.weight",
        "enc.blk.1.ffn_up_exps.weight",
        "dec.blk.1.cross_attn_q.weight",
        "dec.output_norm.weight",
        "switch.attention.relative_buckets_count",
        "switch.decoder_start_token_id",
    ] {
        lacks(&switch, missing);
    }
    let nllb = common::convert_golden("nllb_moe", "f32", dir.path());
    for missing in
        ["enc.blk.3.ffn_down_exps.bias", "dec.blk.0.attn_q.bias", "tokenizer.ggml.padding_token_id"]
    {
        lacks(&nllb, missing);
    }
}

#[test]
fn a_text_is_read_before_it_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let engine = load(&common::convert_golden("switch", "f32", dir.path()), &options());
    let mut session = engine.new_session().unwrap();
    let error = session.eval(&[0], Want::Last).unwrap_err().to_string();
    assert!(error.contains("source text"), "{error}");
    let error = session.encode(&[]).unwrap_err().to_string();
    assert!(error.contains("empty"), "{error}");
    let error = session.encode(&[1_000_000]).unwrap_err().to_string();
    assert!(error.contains("1000000"), "{error}");
    let decoder = load(&common::convert_golden("mixtral", "f32", dir.path()), &options());
    let error = decoder.new_session().unwrap().encode(&[1]).unwrap_err().to_string();
    assert!(error.contains("mixtral") && error.contains("no encoder"), "{error}");
}
