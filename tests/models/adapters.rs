//! Golden checkpoints with LoRA adapters against peft (`tests/golden/make_adapters.py`).

use crate::cards::error;
use common::jobs::{Sink, Text, job};
use common::{adapters, argmax, cards, convert_golden, golden, golden_options, jobs, load};
use moeba::convert::{ConvertOptions, Mix, convert};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{AdapterFile, Engine, EngineOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Adapters that no file of their own can hold, and the field that says so.
const MERGED_ONLY: &[(&str, &str)] = &[
    ("biases", "attn_k.bias"),
    ("latent", "attn_k_b.weight"),
    ("lengths", "attn_k.weight"),
    ("saved", "attn_q.weight"),
    ("tied", "tie_word_embeddings"),
    ("tied_embedding", "tie_word_embeddings"),
];

/// Options that convert an adapter's base with it, into `dir`.
fn options(name: &str, file: &str, dir: &Path) -> ConvertOptions {
    let card = adapters::card(name);
    let adapter = dir.join(format!("{name}.adapter"));
    adapters::write(name, &card, &adapter);
    ConvertOptions {
        folder: golden(card["base"].as_str().unwrap()),
        output: dir.join(file),
        mix: Some(Mix::F32),
        lora: vec![adapter],
        ..ConvertOptions::default()
    }
}

/// An adapter's base and the adapter, as files in `dir`.
fn beside(name: &str, dir: &Path) -> (PathBuf, AdapterFile) {
    let base = convert_golden(adapters::card(name)["base"].as_str().unwrap(), "f32", dir);
    let options = options(name, &format!("{name}.lora.gguf"), dir);
    convert(&ConvertOptions { lora_only: true, ..options.clone() }).unwrap();
    (base, AdapterFile { path: options.output, scale: 1.0 })
}

fn with(files: &[AdapterFile]) -> EngineOptions {
    EngineOptions { adapters: files.to_vec(), ..golden_options() }
}

fn logits(engine: &Arc<Engine>, tokens: &[u32]) -> Vec<f32> {
    let mut session = engine.new_session().unwrap();
    let mut got = Vec::new();
    session.eval_all(tokens, &mut |_, l| got.extend_from_slice(&l[..cards::N_IDS])).unwrap();
    got
}

/// The fault of logits, if there is one.
fn fault(name: &str, engine: &Arc<Engine>) -> Option<String> {
    let (tokens, expected) = cards::logits_in(&adapters::folder(), name);
    let got = logits(engine, &tokens);
    let error = error(&got, &expected);
    eprintln!("{name}: {error:.1e}");
    let best = |all: &[f32]| all.chunks_exact(cards::N_IDS).map(argmax).collect::<Vec<_>>();
    (error > 1e-8 || best(&got) != best(&expected)).then(|| format!("{name}: {error:.1e}"))
}

#[test]
fn merged_adapters_give_the_logits_of_peft() {
    let dir = tempfile::tempdir().unwrap();
    let faults = adapters::names().into_iter().filter_map(|name| {
        let options = options(&name, "merged.gguf", dir.path());
        convert(&options).unwrap();
        fault(&name, &load(&options.output, &golden_options()))
    });
    let faults: Vec<String> = faults.collect();
    assert!(faults.is_empty(), "{faults:?}");
}

#[test]
fn adapters_beside_a_model_give_the_logits_of_peft() {
    let dir = tempfile::tempdir().unwrap();
    let mut faults = Vec::new();
    for name in adapters::names() {
        if let Some((_, field)) = MERGED_ONLY.iter().find(|(other, _)| *other == name) {
            let options = options(&name, "refused.gguf", dir.path());
            let options = ConvertOptions { lora_only: true, ..options };
            let message = convert(&options).unwrap_err().to_string();
            assert!(message.contains(field) && message.contains("merge"), "{name}: {message}");
            assert!(!options.output.exists());
            continue;
        }
        let (base, adapter) = beside(&name, dir.path());
        faults.extend(fault(&name, &load(&base, &with(&[adapter]))));
    }
    assert!(faults.is_empty(), "{faults:?}");
}

/// Half of an adapter twice is the adapter; none of it is the base, to the bit; and where experts
/// are changes no bit.
#[test]
fn scales_add_up_and_streamed_experts_have_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let (base, adapter) = beside("experts_all_linear", dir.path());
    let of = |scale| AdapterFile { scale, ..adapter.clone() };
    let (tokens, expected) = cards::logits_in(&adapters::folder(), "experts_all_linear");
    let halves = logits(&load(&base, &with(&[of(0.5), of(0.5)])), &tokens);
    assert!(error(&halves, &expected) < 1e-8);
    let plain = logits(&load(&base, &golden_options()), &tokens);
    assert_eq!(logits(&load(&base, &with(&[of(0.0)])), &tokens), plain);
    let whole = logits(&load(&base, &with(&[of(1.0)])), &tokens);
    let streamed = EngineOptions { ram: RamBudget::Percent(40.0), ..with(&[of(1.0)]) };
    assert_eq!(logits(&load(&base, &streamed), &tokens), whole);
    let alone = EngineOptions { n_ubatch: Some(1), n_threads: Some(1), ..with(&[of(1.0)]) };
    assert_eq!(logits(&load(&base, &alone), &tokens), whole);
}

/// The texts of jobs at once, each with its part of the adapter.
fn texts(engine: &Arc<Engine>, n_sessions: usize, scales: &[Option<f32>]) -> Vec<Text> {
    let mut core = jobs::core(engine, n_sessions, 1 << 20);
    let submit = |scale: &Option<f32>| {
        let (mut job, sink): (_, Sink) = job(engine, &jobs::prompt(40, 40, 0), None);
        if let Some(scale) = scale {
            job.adapters = Some(vec![*scale].into());
            job.salt = Some(u64::from(scale.to_bits()));
        }
        core.submit(job);
        sink.text
    };
    let sinks: Vec<_> = scales.iter().map(submit).collect();
    while core.step() {}
    sinks.iter().map(|text| text.lock().unwrap().clone()).collect()
}

#[test]
fn texts_of_other_scales_do_not_change_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let (base, adapter) = beside("experts_all_linear", dir.path());
    let options = EngineOptions { n_sessions: 4, ..with(&[adapter]) };
    let engine = load(&base, &options);
    let scales = [None, Some(0.0), Some(0.5), Some(-2.0)];
    let alone: Vec<Text> =
        scales.iter().flat_map(|scale| texts(&engine, 1, std::slice::from_ref(scale))).collect();
    assert!(alone.windows(2).all(|pair| pair[0] != pair[1]), "{alone:?}");
    assert_eq!(texts(&engine, 4, &scales), alone);
    // One session after the other, with the same prompt in the caches.
    let again = [&scales[..], &scales].concat();
    assert_eq!(texts(&engine, 1, &again), [&alone[..], &alone].concat());
}

#[test]
fn files_that_are_no_adapter_of_the_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (base, adapter) = beside("down_alone", dir.path());
    let other = convert_golden("qwen3moe", "f32", dir.path());
    let refused = |model: &Path, file: &Path, words: &[&str]| {
        let options = with(&[AdapterFile { path: file.into(), scale: 1.0 }]);
        let why = Engine::load(model, &options, &mut |_| ()).map(drop).unwrap_err().to_string();
        assert!(words.iter().all(|word| why.contains(word)), "{why}");
    };
    refused(&base, &base, &["general.type", "adapter"]);
    refused(&other, &adapter.path, &["general.architecture", "qwen3moe", "qwen2moe"]);
    let (_, wrong) = beside("stacked", dir.path());
    refused(&base, &wrong.path, &["general.architecture"]);
}
