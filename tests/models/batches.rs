//! Any mix of rows of several texts gives each text the bits that it has alone.
//!
//! Random texts are computed in random batches: prompts cut into random chunks, beside steps of
//! decode of other texts. Each text's logits and chosen experts are compared to the bit with those
//! of the text alone, whose prompt is one batch and whose steps are one token each.

use common::{convert_golden, golden_options, load};
use moeba::backend::cpu::Cpu;
use moeba::backend::selftest::data::Random;
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{CacheType, Engine, EngineOptions, Logits, Recorder, RouteRows};
use moeba::experts::disk::IoKind;
use moeba::forward::{Batch, Buffers, NoRests, Outputs, Segment, Want};
use moeba::gguf::Gguf;
use moeba::model::Model;
use moeba::model::kv::{self, KvCache};
use moeba::policy::Phase;
use std::path::Path;

/// A model of each architecture and kind of layer.
const MODELS: [&str; 56] = [
    "llama",
    "llama3_rope",
    "qwen2",
    "qwen3",
    "qwen2moe",
    "qwen3moe",
    "mixtral",
    "olmoe",
    "granitemoe",
    "phimoe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "deepseek",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "glm4moe",
    "dots1",
    "qwen3next",
    "qwen35moe",
    "arctic_mixed",
    "switch",
    "nllb_moe",
    "afmoe",
    "bailingmoe2",
    "cohere2moe",
    "dbrx",
    "grok",
    "llama4_hf",
    "laguna",
    "mimo2",
    "step35",
    "smallthinker",
    "mellum",
    "mistral4",
    "gemma4",
    "gemma4_shared_hf",
    "glm-dsa",
    "mistral-large4",
    "granitehybrid",
    "jamba",
    "kimi-linear",
    "lfm2moe",
    "minimax-01",
    "nemotron_h_moe",
    "grovemoe",
    "refact",
    "dots3note",
    "hy_v4",
    "kimi-k3",
    "minimax-m3",
    "deepseek4",
    "deepseek41",
    "deepseek41_yarn",
    "glm5-next",
    "qwen4exp",
];

const N_CTX: usize = 80;

/// A text: a prompt, tokens that follow it one by one, and what an encoder reads before.
struct Text {
    source: Vec<u32>,
    tokens: Vec<u32>,
    n_prompt: usize,
}

/// The results of a model for a text, as bits.
#[derive(Default, PartialEq)]
struct Outcome {
    /// [tokens, n_vocab]
    logits: Vec<u32>,
    /// The choices of each layer, [tokens, k].
    experts: Vec<Vec<u32>>,
}

/// Records all texts of a run.
struct Records {
    outcomes: Vec<Outcome>,
}

impl Recorder for Outcome {
    fn routed(&mut self, layer: usize, route: RouteRows<'_>, hidden: &[f32]) {
        self.experts.resize_with(self.experts.len().max(layer + 1), Vec::new);
        self.experts[layer].extend_from_slice(route.chosen);
        assert_eq!(hidden.len() % (route.chosen.len() / route.k), 0);
    }
}

impl Outputs for Records {
    fn recorder(&mut self, session: usize) -> Option<&mut dyn Recorder> {
        Some(&mut self.outcomes[session])
    }

    fn logits(&mut self, session: usize, _token: usize, logits: Logits<'_>) {
        let Logits::All(logits) = logits else { panic!("all were wanted") };
        self.outcomes[session].logits.extend(logits.iter().map(|l| l.to_bits()));
    }
}

/// Texts on their way through a model, each with a cache of its own.
struct Run<'a> {
    model: &'a Model,
    cpu: &'a Cpu,
    texts: &'a [Text],
    caches: Vec<KvCache>,
    done: Vec<usize>,
    buffers: Buffers,
    records: Records,
}

impl<'a> Run<'a> {
    fn new(model: &'a Model, cpu: &'a Cpu, texts: &'a [Text], types: [CacheType; 2]) -> Self {
        let shapes = model.hyper().cache_shapes();
        let cache = |_: &Text| KvCache::new(&shapes, N_CTX, types[0], types[1]);
        let outcomes = texts.iter().map(|_| Outcome::default()).collect();
        Run {
            model,
            cpu,
            texts,
            caches: texts.iter().map(cache).collect(),
            done: vec![0; texts.len()],
            buffers: Buffers::default(),
            records: Records { outcomes },
        }
    }

    /// Texts that have tokens left.
    fn unfinished(&self) -> Vec<usize> {
        (0..self.texts.len()).filter(|t| self.done[*t] < self.texts[*t].tokens.len()).collect()
    }

    /// Reads the source texts of some texts.
    fn encode(&mut self, texts: &[usize]) {
        let mut batch = Batch::default();
        for &t in texts {
            batch.push(segment(t, 0, Phase::Prompt, Want::None), &self.texts[t].source);
        }
        let mut caches: Vec<&mut KvCache> = self.caches.iter_mut().collect();
        let Run { model, cpu, buffers, records, .. } = self;
        model.encode(cpu, &batch, &mut caches, buffers, records, &mut NoRests).unwrap();
    }

    /// Computes the next `n` tokens of each of some texts, given as (text, n).
    fn step(&mut self, parts: &[(usize, usize)]) {
        let mut batch = Batch::default();
        for &(t, n) in parts {
            let Text { tokens, n_prompt, .. } = &self.texts[t];
            let past = self.done[t];
            let phase = if past < *n_prompt { Phase::Prompt } else { Phase::Decode };
            batch.push(segment(t, past, phase, Want::All), &tokens[past..past + n]);
            self.done[t] += n;
        }
        let mut caches: Vec<&mut KvCache> = self.caches.iter_mut().collect();
        let Run { model, cpu, buffers, records, .. } = self;
        model.forward(cpu, &batch, &mut caches, buffers, records, &mut NoRests).unwrap();
    }
}

fn segment(session: usize, past: usize, phase: Phase, want: Want) -> Segment {
    Segment { session, request: session as u32, past, phase, want }
}

/// Each text alone: its prompt at once, then token by token.
fn alone(model: &Model, texts: &[Text], types: [CacheType; 2]) -> Vec<Outcome> {
    let cpu = Cpu::new(1);
    let mut run = Run::new(model, &cpu, texts, types);
    for (t, text) in texts.iter().enumerate() {
        if !text.source.is_empty() {
            run.encode(&[t]);
        }
        run.step(&[(t, text.n_prompt)]);
        for _ in text.n_prompt..text.tokens.len() {
            run.step(&[(t, 1)]);
        }
    }
    run.records.outcomes
}

/// All texts in random batches. `whole`: prompts are not cut, as the capacity of experts counts
/// the tokens that are handed over at once.
fn mixed(
    model: &Model,
    texts: &[Text],
    types: [CacheType; 2],
    random: &mut Random,
    whole: bool,
) -> Vec<Outcome> {
    let cpu = Cpu::new(2);
    let mut run = Run::new(model, &cpu, texts, types);
    if texts.iter().any(|text| !text.source.is_empty()) {
        let (now, later): (Vec<_>, Vec<_>) = (0..texts.len()).partition(|_| random.below(2) == 0);
        [now, later].iter().filter(|part| !part.is_empty()).for_each(|part| run.encode(part));
    }
    loop {
        let unfinished = run.unfinished();
        if unfinished.is_empty() {
            return run.records.outcomes;
        }
        let mut parts = Vec::new();
        for t in unfinished {
            let (text, past) = (&texts[t], run.done[t]);
            let left = text.n_prompt.saturating_sub(past);
            let n = match left {
                // Some tokens of decode at once: a draft that is verified.
                0 => 1 + random.below((text.tokens.len() - past).min(2)),
                _ if whole => left,
                _ => 1 + random.below(left),
            };
            if random.below(3) > 0 {
                parts.push((t, if left == 0 && whole { 1 } else { n }));
            }
        }
        // In any order.
        for i in (1..parts.len()).rev() {
            parts.swap(i, random.below(i + 1));
        }
        if !parts.is_empty() {
            run.step(&parts);
        }
    }
}

fn texts(model: &Model, random: &mut Random) -> Vec<Text> {
    let n_vocab = model.n_vocab().min(256);
    let mut ids = |n: usize| (0..n).map(|_| random.below(n_vocab) as u32).collect::<Vec<_>>();
    let lengths = [(17, 2), (1, 5), (9, 3), (30, 1)];
    let has_encoder = model.hyper().encoder.is_some();
    let text = |(n_prompt, n_decoded): (usize, usize)| Text {
        source: if has_encoder { ids(2 * n_prompt + 1) } else { Vec::new() },
        tokens: ids(n_prompt + n_decoded),
        n_prompt,
    };
    lengths.map(text).into()
}

fn compare(what: &str, got: &[Outcome], expected: &[Outcome]) {
    for (t, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(got.logits == expected.logits, "{what}: other logits of text {t}");
        assert!(got.experts == expected.experts, "{what}: other experts of text {t}");
    }
}

/// The pairs of types of keys and values that a case tests.
fn types_of(case: usize) -> [CacheType; 2] {
    let all = CacheType::ALL;
    match case {
        0 => [CacheType::F32; 2],
        _ => [all[case % all.len()], all[(5 * case + 3) % all.len()]],
    }
}

fn check(path: &Path, options: &EngineOptions, cases: std::ops::Range<usize>) {
    let engine = load(path, options);
    let model = engine.model();
    let is_limited = model.hyper().routing.capacity.is_some();
    for case in cases {
        let mut types = types_of(case);
        if kv::check(&model.hyper().cache_shapes(), types[0], types[1]).is_err() {
            types = [CacheType::F16, CacheType::BF16];
        }
        let mut random = Random(case as u64 + 1);
        let texts = texts(model, &mut random);
        let expected = alone(model, &texts, types);
        let n_texts = 1 + case % texts.len();
        let texts = &texts[texts.len() - n_texts..];
        let expected = &expected[expected.len() - n_texts..];
        let got = mixed(model, texts, types, &mut random, is_limited);
        let [k, v] = types;
        let what = format!("{}, case {case}, cache of {k} and {v}", path.display());
        compare(&what, &got, expected);
        assert!(model.hierarchy().check_integrity() || options.ram != RamBudget::Auto, "{what}");
    }
}

#[test]
fn every_architecture() {
    let dir = tempfile::tempdir().unwrap();
    let n_cases = if cfg!(debug_assertions) { 1 } else { 4 };
    for (i, name) in MODELS.into_iter().enumerate() {
        let path = convert_golden(name, ["f32", "q8_0"][i % 2], dir.path());
        let first = (i * n_cases) % 9;
        check(&path, &golden_options(), first..first + n_cases);
    }
}

/// With experts that are streamed from disk under a small budget.
#[test]
fn streamed() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["qwen3moe", "deepseek_v3", "switch", "qwen4exp", "deepseek41", "k2-horizon_mova"] {
        let path = convert_golden(name, "q8_0", dir.path());
        let options = EngineOptions { io: IoKind::Pread, ..golden_options() };
        let minimum = Engine::plan_of(&path, &options).unwrap().sizes.minimum_bytes;
        let ram = RamBudget::Bytes(minimum);
        check(&path, &EngineOptions { ram, ..options }, 3..5);
    }
}

/// Rows of a table of n-grams are read as tokens ask for them, however the rest is held.
#[test]
fn a_table_of_ngrams_stays_in_the_file() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["qwen4exp", "deepseek41"] {
        let path = convert_golden(name, "f32", dir.path());
        let file = Gguf::open(&path).unwrap();
        let all: u64 = file.tensors().iter().map(|tensor| tensor.n_bytes).sum();
        let table = file.tensor("per_layer_token_embd.weight").unwrap().n_bytes;
        let sizes = Engine::plan_of(&path, &golden_options()).unwrap().sizes;
        assert_eq!(sizes.dense_bytes + sizes.expert_bytes, all - table, "{name}");
        check(&path, &EngineOptions { mmap: false, ..golden_options() }, 0..1);
    }
}
