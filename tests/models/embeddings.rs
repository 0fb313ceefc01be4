//! Embeddings: outputs of tokens whose products with the output matrix are the reference's logits,
//! and what is pooled of them in any batch, memory and schedule.

use common::edits::{File, Tensor};
use common::{Npy, convert_golden, golden_options, load, read_ids, repo};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::scheduler::{Core, Job, JobSink, Owner};
use moeba::engine::{
    Cancel, Embedding, Engine, EngineOptions, Generation, Outcome, Pooling, Request, TestHooks,
    TextSink, Want,
};
use std::path::Path;
use std::sync::{Arc, Mutex};

const POOLINGS: [Pooling; 4] = [Pooling::None, Pooling::Mean, Pooling::Cls, Pooling::Last];

fn embed(engine: &Arc<Engine>, tokens: &[u32], pooling: Pooling) -> Embedding {
    engine.new_session().unwrap().embed(tokens, pooling).unwrap()
}

fn text(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + i * i) % 300 + 3).collect()
}

/// Attention, latent attention, a state, and no experts.
const MODELS: [&str; 4] = ["qwen3moe", "glm4_moe_lite", "qwen3next", "qwen3"];

#[test]
fn outputs_lead_to_the_logits_of_the_reference() {
    for name in MODELS {
        let folder = tempfile::tempdir().unwrap();
        let path = convert_golden(name, "f32", folder.path());
        let expect = repo().join("tests/golden").join(name).join("expect");
        let tokens = read_ids(&expect.join("p17.tokens.json"));
        let wanted = Npy::read(&expect.join("p17.logits.npy")).f32s();
        let engine = load(&path, &EngineOptions { n_ctx: Some(32), ..golden_options() });
        let outputs = embed(&engine, &tokens, Pooling::None);
        assert_eq!(outputs.values.len(), tokens.len() * outputs.width, "{name}");
        let file = File::read(&path);
        let has_output = file.tensors.iter().any(|tensor| tensor.name == "output.weight");
        let head = if has_output { "output.weight" } else { "token_embd.weight" };
        let head = file.tensor(head).f32s();
        let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let rows = || head.chunks(outputs.width);
        let logits = outputs.rows().flat_map(|x| rows().map(move |row| product(x, row)));
        let largest = wanted.iter().fold(0f32, |most, v| most.max(v.abs()));
        let worst = logits.zip(&wanted).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(worst < 1e-3 * largest, "{name}: off by {worst} of {largest}");
        // Other poolings are of these outputs.
        let row = |i: usize| outputs.rows().nth(i).unwrap().to_vec();
        assert_eq!(embed(&engine, &tokens, Pooling::Cls).values, row(0), "{name}");
        assert_eq!(embed(&engine, &tokens, Pooling::Last).values, row(16), "{name}");
        let mean = embed(&engine, &tokens, Pooling::Mean);
        assert_eq!(mean.values.len(), outputs.width, "{name}");
        for (i, x) in mean.values.iter().enumerate() {
            let sum: f64 = outputs.rows().map(|row| f64::from(row[i])).sum();
            assert_eq!(*x, (sum / 17.0) as f32, "{name}");
        }
    }
}

/// Receives a job's embedding.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Option<Embedding>>>);

impl TextSink for Sink {
    fn text(&mut self, text: &str) -> moeba::Result<()> {
        panic!("{text:?}")
    }
}

impl JobSink for Sink {
    fn embedded(&mut self, embedding: Embedding) {
        *self.0.lock().unwrap() = Some(embedding);
    }

    fn finished(&mut self, result: moeba::Result<Outcome>) {
        assert_eq!(result.unwrap().n_generated, 0);
    }
}

fn job(engine: &Arc<Engine>, prompt: Vec<u32>, pooling: Pooling) -> (Job<Sink>, Sink) {
    let request = Request { prompt, pooling: Some(pooling), ..Request::default() };
    let (generation, sink) = (Generation::new(engine, &request).unwrap(), Sink::default());
    let job = Job {
        id: 0,
        prompt: request.prompt,
        source: None,
        generation,
        sink: sink.clone(),
        cancel: Cancel::new(),
        owner: Owner::default(),
        salt: None,
        priority: 0,
        slot: None,
        adapters: None,
    };
    (job, sink)
}

fn settings() -> Vec<(&'static str, EngineOptions)> {
    let base = EngineOptions { n_ctx: Some(96), ..golden_options() };
    let streamed = EngineOptions {
        ram: RamBudget::Percent(60.0),
        test: TestHooks { lockstep: true, ..TestHooks::default() },
        ..base.clone()
    };
    vec![
        ("passes of 7", EngineOptions { n_ubatch: Some(7), ..base.clone() }),
        ("one by one", EngineOptions { n_ubatch: Some(1), ..base.clone() }),
        ("one thread", EngineOptions { n_threads: Some(1), ..base.clone() }),
        ("in memory", EngineOptions { mmap: false, ..base.clone() }),
        ("streamed", streamed.clone()),
        ("streamed in parts", EngineOptions { n_ubatch: Some(16), ..streamed }),
        ("with drafts", EngineOptions { predicts_next: true, ..base }),
    ]
}

#[test]
fn a_text_has_the_same_bits_in_any_setting() {
    for name in MODELS {
        let folder = tempfile::tempdir().unwrap();
        let path = convert_golden(name, "f32", folder.path());
        let base = load(&path, &EngineOptions { n_ctx: Some(96), ..golden_options() });
        let expected = POOLINGS.map(|pooling| embed(&base, &text(70), pooling));
        for (what, options) in settings() {
            // A model without experts streams none, and one of few has no budget of so few.
            let Ok(engine) = Engine::load(&path, &options, &mut |_| ()) else {
                assert!(what.starts_with("streamed"), "{name}, {what}");
                continue;
            };
            for (pooling, expected) in POOLINGS.into_iter().zip(&expected) {
                assert_eq!(embed(&engine, &text(70), pooling), *expected, "{name}, {what}");
            }
        }
        // Several texts in one schedule, and after them one that continues nothing.
        let sessions = (0..3).map(|_| base.new_session().unwrap()).collect();
        let mut core: Core<Sink> = Core::new(&base, sessions, 0.5, 1 << 20);
        let lengths = [70, 3, 70, 41, 70];
        let jobs = lengths.map(|n| job(&base, text(n), Pooling::Mean));
        let sinks = jobs.map(|(job, sink)| {
            core.submit(job);
            sink
        });
        while core.step() {}
        for (sink, n) in sinks.iter().zip(lengths) {
            let got = sink.0.lock().unwrap().take().unwrap();
            assert_eq!(got, embed(&base, &text(n), Pooling::Mean), "{name}, {n} tokens");
        }
    }
}

#[test]
fn a_session_goes_on_after_an_embedding() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "f32", folder.path());
    let engine = load(&path, &EngineOptions { n_ctx: Some(96), ..golden_options() });
    let mut session = engine.new_session().unwrap();
    let tokens = text(20);
    let whole = session.eval(&tokens, Want::Last).unwrap().all().to_vec();
    let first = session.embed(&tokens, Pooling::Last).unwrap();
    assert_eq!(session.n_past(), 20);
    session.embed(&text(5), Pooling::Mean).unwrap();
    assert_eq!(session.embed(&tokens, Pooling::Last).unwrap(), first);
    session.truncate(0);
    assert_eq!(session.eval(&tokens, Want::Last).unwrap().all(), whole);
}

#[test]
fn what_cannot_be_embedded_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "f32", folder.path());
    let engine = load(&path, &EngineOptions { n_ctx: Some(16), ..golden_options() });
    let mut session = engine.new_session().unwrap();
    let mut fails = |tokens: &[u32], pooling, words: &[&str]| {
        let why = session.embed(tokens, pooling).unwrap_err().to_string();
        words.iter().for_each(|word| assert!(why.contains(word), "no {word:?} in {why}"));
    };
    fails(&[], Pooling::Mean, &["no tokens"]);
    fails(&text(17), Pooling::Mean, &["17 tokens", "context of 16"]);
    fails(&[1, 99_999], Pooling::Last, &["99999", "out of range"]);
    fails(&[1, 2], Pooling::Rank, &["qwen3moe", "no head that ranks"]);
    // A session whose embedding has failed has none left.
    let tokens = text(9);
    assert_eq!(
        session.embed(&tokens, Pooling::Mean).unwrap(),
        embed(&engine, &tokens, Pooling::Mean)
    );
    let path = convert_golden("switch", "f32", folder.path());
    let engine = load(&path, &EngineOptions { n_ctx: Some(16), ..golden_options() });
    let why = engine.new_session().unwrap().embed(&[1], Pooling::Mean).unwrap_err();
    assert!(why.to_string().contains("encoder-decoder"), "{why}");
}

/// The file with this pooling and the head of a reranker.
fn edited(path: &Path, keys: &[(&str, u32)], tensors: Vec<Tensor>) -> std::path::PathBuf {
    let mut file = File::read(path);
    keys.iter().for_each(|(key, value)| file.set(key, *value));
    file.tensors.extend(tensors);
    let to = path.with_extension("edited.gguf");
    file.write(&to);
    to
}

#[test]
fn the_file_says_how_outputs_are_pooled() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "f32", folder.path());
    let options = EngineOptions { n_ctx: Some(16), ..golden_options() };
    assert_eq!(load(&path, &options).pooling().unwrap(), Pooling::Last);
    for (number, pooling) in (0..).zip([Pooling::None, Pooling::Mean, Pooling::Cls]) {
        let path = edited(&path, &[("qwen3moe.pooling_type", number)], Vec::new());
        assert_eq!(load(&path, &options).pooling().unwrap(), pooling);
    }
    let path = edited(&path, &[("qwen3moe.pooling_type", 9)], Vec::new());
    let why = load(&path, &options).pooling().unwrap_err().to_string();
    assert!(why.contains("qwen3moe.pooling_type") && why.contains("0 to 4"), "{why}");
}

#[test]
fn a_head_makes_scores_of_the_last_output() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3", "f32", folder.path());
    let options = EngineOptions { n_ctx: Some(32), ..golden_options() };
    let engine = load(&path, &options);
    let last: Vec<f64> =
        embed(&engine, &text(9), Pooling::Last).values.iter().map(|x| f64::from(*x)).collect();
    let n = last.len();
    let weights = |n: usize, seed: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * 31 + seed) % 17) as f32 / 17.0 - 0.5).collect()
    };
    let product = |w: &[f32], x: &[f64]| -> Vec<f64> {
        w.chunks(n).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
    };
    let (dense, two, one) = (weights(n * n, 1), weights(2 * n, 2), weights(n, 3));
    let bias = weights(n, 4);
    let size = n as u64;
    let near = |got: &[f32], expected: &[f64]| {
        assert_eq!(got.len(), expected.len());
        let is_near = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() < 1e-5;
        assert!(got.iter().zip(expected).all(is_near), "{got:?} {expected:?}");
    };
    // Probabilities of two labels, which rerankers of Qwen 3 have.
    let head = Tensor::of("cls.output.weight", &[size, 2], &two);
    let ranks = load(&edited(&path, &[("qwen3.pooling_type", 4)], vec![head]), &options);
    assert_eq!(ranks.pooling().unwrap(), Pooling::Rank);
    let logits = product(&two, &last);
    let yes = 1.0 / (1.0 + (logits[1] - logits[0]).exp());
    near(&embed(&ranks, &text(9), Pooling::Rank).values, &[yes, 1.0 - yes]);
    // A layer before a single score.
    let head = vec![
        Tensor::of("cls.weight", &[size, size], &dense),
        Tensor::of("cls.bias", &[size], &bias),
        Tensor::of("cls.output.weight", &[size, 1], &one),
        Tensor::of("cls.output.bias", &[1], &[0.25]),
    ];
    let ranks = load(&edited(&path, &[], head), &options);
    let inner: Vec<f64> =
        product(&dense, &last).iter().zip(&bias).map(|(x, b)| (x + f64::from(*b)).tanh()).collect();
    near(&embed(&ranks, &text(9), Pooling::Rank).values, &[product(&one, &inner)[0] + 0.25]);
    // Other embeddings are as they were.
    assert_eq!(
        embed(&ranks, &text(9), Pooling::Mean).values,
        embed(&engine, &text(9), Pooling::Mean).values
    );
}

/// The encoder's outputs are those of the reference, in any setting, alone and among other texts.
#[test]
fn an_embedding_model_is_that_of_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert_golden("nomic_bert_moe", "f32", folder.path());
    let expect = repo().join("tests/golden/nomic_bert_moe/expect");
    let base = EngineOptions { n_ctx: Some(96), ..golden_options() };
    let engine = load(&path, &base);
    assert_eq!(engine.pooling().unwrap(), Pooling::Mean);
    for n in [5, 17, 70] {
        let tokens = read_ids(&expect.join(format!("p{n}.tokens.json")));
        let wanted = Npy::read(&expect.join(format!("p{n}.outputs.npy")));
        let outputs = embed(&engine, &tokens, Pooling::None);
        assert_eq!([n, outputs.width], wanted.shape[..]);
        let wanted = wanted.f32s();
        let largest = wanted.iter().fold(0f32, |most, v| most.max(v.abs()));
        let off = outputs.values.iter().zip(&wanted).map(|(a, b)| (a - b).abs());
        let worst = off.fold(0f32, f32::max);
        assert!(worst < 1e-4 * largest, "p{n}: off by {worst} of {largest}");
        let mean = embed(&engine, &tokens, Pooling::Mean);
        for (i, x) in mean.values.iter().enumerate() {
            let sum: f64 = outputs.rows().map(|row| f64::from(row[i])).sum();
            assert_eq!(*x, (sum / n as f64) as f32);
        }
        for (what, options) in settings() {
            let Ok(engine) = Engine::load(&path, &options, &mut |_| ()) else {
                assert!(what.starts_with("streamed"), "{what}");
                continue;
            };
            assert_eq!(embed(&engine, &tokens, Pooling::Mean), mean, "{what}");
        }
    }
    let sessions = (0..4).map(|_| engine.new_session().unwrap()).collect();
    let mut core: Core<Sink> = Core::new(&engine, sessions, 0.5, 1 << 20);
    let texts = [70, 3, 41, 20, 96].map(|n| text(n).iter().map(|id| id % 40).collect::<Vec<_>>());
    let jobs = texts.clone().map(|text| job(&engine, text, Pooling::Mean));
    let sinks = jobs.map(|(job, sink)| {
        core.submit(job);
        sink
    });
    while core.step() {}
    for (sink, text) in sinks.iter().zip(&texts) {
        let got = sink.0.lock().unwrap().take().unwrap();
        assert_eq!(got, embed(&engine, text, Pooling::Mean), "{} tokens", text.len());
    }
}

#[test]
fn an_embedding_model_says_that_it_is_none_that_answers() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert_golden("nomic_bert_moe", "q8_0", folder.path());
    let engine = load(&path, &EngineOptions { n_ctx: Some(16), ..golden_options() });
    let why = engine.check_continues().unwrap_err().to_string();
    assert!(why.contains("embedding model: use moeba embed"), "{why}");
    let why = engine.new_session().unwrap().eval(&[5], Want::Last).unwrap_err().to_string();
    assert!(why.contains("moeba embed"), "{why}");
    let texts = repo().join("tests/golden/nomic_bert_moe/expect/text.json");
    let texts = std::fs::read_to_string(texts).unwrap();
    let texts: serde_json::Value = serde_json::from_str(&texts).unwrap();
    for one in texts.as_array().unwrap() {
        let ids: Vec<u32> = serde_json::from_value(one["ids"].clone()).unwrap();
        let text = one["text"].as_str().unwrap();
        let options = moeba::tokenizer::EncodeOptions::PROMPT;
        assert_eq!(engine.tokenizer().encode(text, options), ids, "{text:?}");
    }
    for command in ["run", "perplexity", "logits", "diffuse"] {
        let mut program = common::moeba();
        let out = folder.path().join("logits.npy");
        let tokens = ["--tokens", "5,6", "-o", out.to_str().unwrap()];
        program.arg(command).arg(&path).args(match command {
            "perplexity" => &["-f", "Cargo.toml", "-c", "16"][..],
            "logits" => &tokens,
            _ => &["-p", "the mill"],
        });
        let out = program.current_dir(repo()).output().unwrap();
        let told = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && told.contains("moeba embed"), "{command}: {told}");
    }
    let mut program = common::moeba();
    let out = program.arg("embed").arg(&path).args(["the mill", "a bridge"]).output().unwrap();
    let told = String::from_utf8_lossy(&out.stdout);
    assert!(told.contains("cosine similarity"), "{told}");
}
