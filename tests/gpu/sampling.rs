//! Tokens chosen from a few logits that the device chose, against tokens chosen from all: the same
//! seed gives the same text.

use crate::support::choice;
use common::cli::{Tiny, failed, on, succeeded, tiny};
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::{DeviceChoice, Engine, EngineOptions, Logits, TopK, Want};
use moeba::sample::{Sampler, SamplerOptions};
use std::path::Path;
use std::sync::Arc;

const PROMPT: [u32; 3] = [3, 40, 77];
const DECODED: usize = 2;

fn engine(path: &Path, device: DeviceChoice) -> Arc<Engine> {
    load(path, &EngineOptions { device, n_ctx: Some(32), ..golden_options() })
}

/// The tokens after the prompt, and the number of logits for each token.
fn generate(engine: &Arc<Engine>, options: &SamplerOptions, banned: &[u32]) -> [Vec<usize>; 2] {
    let mut session = engine.new_session().unwrap();
    let mut sampler = Sampler::new(options.clone()).unwrap();
    sampler.ban(banned.iter().copied());
    PROMPT.iter().for_each(|&id| sampler.accept(id));
    let n_vocab = engine.tokenizer().n_vocab();
    let (mut fed, mut tokens, mut sizes) = (PROMPT.to_vec(), Vec::new(), Vec::new());
    for _ in 0..1 + DECODED {
        let want = sampler.n_best().map_or(Want::Last, |k| Want::LastBest(TopK { k, n_vocab }));
        let (size, next) = match session.eval(&fed, want).unwrap() {
            Logits::All(all) => (all.len(), sampler.sample(&all[..n_vocab])),
            Logits::Best { ids, logits } => (ids.len(), sampler.sample_best(ids, logits)),
        };
        sizes.push(size);
        let next = next.unwrap();
        sampler.accept(next);
        tokens.push(next as usize);
        fed = vec![next];
    }
    [tokens, sizes]
}

/// Options, and how many logits they take.
fn cases(n_vocab: usize) -> Vec<(SamplerOptions, usize)> {
    let seeded = |seed| SamplerOptions { seed: Some(seed), temp: 1.5, ..SamplerOptions::default() };
    let loose = SamplerOptions { top_p: 1.0, min_p: 0.0, ..seeded(1) };
    vec![
        (SamplerOptions::greedy(), 1),
        (SamplerOptions { top_k: 1, ..seeded(2) }, 1),
        (SamplerOptions { top_k: 5, ..loose.clone() }, 5),
        (seeded(3), 40),
        (SamplerOptions { top_k: 40, min_p: 0.3, ..loose.clone() }, 40),
        (SamplerOptions { top_k: 256, ..loose.clone() }, 256),
        (SamplerOptions { top_k: 256, top_p: 0.7, ..seeded(4) }, 256),
        // More than the device chooses, all, and what all logits are changed by.
        (SamplerOptions { top_k: 257, ..loose.clone() }, n_vocab),
        (SamplerOptions { top_k: 0, ..loose }, n_vocab),
        (SamplerOptions { repeat_penalty: 1.3, ..seeded(5) }, n_vocab),
        (SamplerOptions { presence_penalty: 0.5, ..SamplerOptions::greedy() }, n_vocab),
    ]
}

/// `outtype` and a vocabulary of more than 257.
fn draws_the_same(name: &str, outtype: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden(name, outtype, dir.path());
    let cpu = engine(&path, DeviceChoice::Cpu);
    let device = engine(&path, choice(Config { seed: 1, ..Config::default() }));
    let n_vocab = cpu.n_vocab();
    let mut texts = Vec::new();
    for (options, size) in cases(n_vocab) {
        let [expected, of_cpu] = generate(&cpu, &options, &[]);
        let [tokens, of_device] = generate(&device, &options, &[]);
        assert_eq!(tokens, expected, "{name}: {options:?}");
        assert_eq!(of_cpu, [n_vocab; 1 + DECODED], "the CPU has them all");
        assert_eq!(of_device, [size; 1 + DECODED], "{name}: {options:?}");
        texts.push(tokens);
    }
    let greedy: Vec<u32> = texts[0].iter().map(|&id| id as u32).collect();
    let banned = SamplerOptions::greedy();
    let [expected, _] = generate(&cpu, &banned, &greedy[..2]);
    let [tokens, sizes] = generate(&device, &banned, &greedy[..2]);
    assert_eq!(tokens, expected, "{name}: two tokens banned");
    assert_ne!(tokens, texts[0], "{name}: two tokens banned");
    assert_eq!(sizes, [3; 1 + DECODED]);
    texts.sort();
    texts.dedup();
    assert!(texts.len() > 4, "{name}: seeds and options matter");
}

#[test]
fn a_seed_gives_the_same_text_on_the_device() {
    draws_the_same("qwen3moe", "q8_0");
}

/// Its logits are divided before anything else.
#[test]
fn divided_logits_do_too() {
    draws_the_same("granitemoe", "f32");
}

const EXACT: [&str; 6] = ["-ctk", "f32", "-ctv", "f32", "-c", "64"];

#[test]
fn a_run_prints_the_same_text() {
    let model = tiny(Tiny::default());
    let run = |device: &str, args: &[&str]| {
        let common = ["-p", "Hello", "-n", "6", "--seed", "7", "--device", device];
        succeeded(&on(&model, "run", &[&common[..], &EXACT, args].concat())).to_owned()
    };
    for args in [&["--temp", "0", "--ignore-eos"][..], &["--temp", "2", "--ignore-eos"], &[]] {
        assert_eq!(run("emulated", args), run("cpu", args), "{args:?}");
    }
}

#[test]
fn broken_logits_are_the_same_sentence() {
    let model = tiny(Tiny { broken: true, ..Tiny::default() });
    for temp in ["0", "1"] {
        for device in ["cpu", "emulated"] {
            let args = ["-p", "Hello", "-n", "2", "--temp", temp, "--device", device];
            let out = on(&model, "run", &[&args[..], &EXACT].concat());
            failed(&out, 1, &["logit for token 0 is NaN", "weights or the computation"]);
        }
    }
}
