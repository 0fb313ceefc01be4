//! Batches of several sessions on the emulated device: each text has the bits that it has alone.

use crate::support::choice;
use common::{convert_golden, golden_options, load};
use moeba::Error;
use moeba::backend::gpu::emulated::Config;
use moeba::backend::selftest::data::Random;
use moeba::engine::{
    BatchRow, CacheType, Cancel, Engine, EngineOptions, Logits, Phase, Session, TestHooks, Want,
};
use std::path::Path;
use std::sync::Arc;

/// A model of each architecture and kind of layer.
const MODELS: [&str; 33] = [
    "llama",
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
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "glm4moe",
    "dots1",
    "qwen3next",
    "qwen35moe",
    "arctic_mixed",
    "lfm2moe",
    "granitehybrid",
    "nemotron_h_moe",
    "minimax-01",
    "kimi-linear",
    "jamba",
    "kimi-k3",
    "deepseek4",
    "glm5-next",
    "qwen4exp",
    "glm-dsa",
    "mistral-large4",
    "dots3note",
    "minimax-m3",
];

/// A text: a prompt and tokens that follow it one by one.
struct Text {
    tokens: Vec<u32>,
    n_prompt: usize,
}

fn texts(engine: &Engine, random: &mut Random) -> Vec<Text> {
    let n_vocab = engine.n_vocab().min(256);
    let text = |(n_prompt, n_decoded): (usize, usize)| {
        let id = |_| random.below(n_vocab) as u32;
        Text { tokens: (0..n_prompt + n_decoded).map(id).collect(), n_prompt }
    };
    [(11, 2), (1, 3), (6, 2)].map(text).into()
}

fn phase(text: &Text, past: usize) -> Phase {
    if past < text.n_prompt { Phase::Prompt } else { Phase::Decode }
}

/// The logits of the tokens up to which `done` has come, as bits by position.
fn hear(heard: &mut Vec<(usize, Vec<u32>)>, session: &mut Session, done: usize) {
    let Logits::All(logits) = session.logits() else { panic!("all were wanted") };
    heard.push((done, logits.iter().map(|l| l.to_bits()).collect()));
}

/// Each text in a session of its own, in random batches of at most `most` texts, whose prompts are
/// cut if `cuts`.
fn run(
    engine: &Arc<Engine>,
    texts: &[Text],
    random: &mut Random,
    most: usize,
    cuts: bool,
) -> Vec<Vec<(usize, Vec<u32>)>> {
    let mut sessions: Vec<_> = texts.iter().map(|_| engine.new_session().unwrap()).collect();
    let mut heard = vec![Vec::new(); texts.len()];
    loop {
        let mut rows = Vec::new();
        let mut ends = Vec::new();
        for (t, session) in sessions.iter_mut().enumerate() {
            let (text, past) = (&texts[t], session.n_past());
            let is_next = past < text.tokens.len() && rows.len() < most;
            if !is_next || (most > 1 && random.below(4) == 0) {
                continue;
            }
            let n = match text.n_prompt.saturating_sub(past) {
                0 => 1,
                left if cuts => 1 + random.below(left),
                left => left,
            };
            let (tokens, phase) = (&text.tokens[past..past + n], phase(text, past));
            ends.push((t, past + n));
            rows.push(BatchRow { session, tokens, phase, want: Want::Last });
        }
        if !rows.is_empty() {
            engine.eval_batch(&mut rows).unwrap();
        }
        for (t, end) in ends {
            hear(&mut heard[t], &mut sessions[t], end);
        }
        if sessions.iter().zip(texts).all(|(s, text)| s.n_past() == text.tokens.len()) {
            return heard;
        }
    }
}

fn on_device(seed: u64, types: [CacheType; 2]) -> EngineOptions {
    let device = choice(Config { seed, ..Config::default() });
    let [cache_type_k, cache_type_v] = types;
    EngineOptions { device, cache_type_k, cache_type_v, n_ctx: Some(40), ..golden_options() }
}

fn check(path: &Path, options: &EngineOptions, seed: u64) {
    let engine = load(path, options);
    let mut random = Random(seed);
    let texts = texts(&engine, &mut random);
    let alone = run(&engine, &texts, &mut random, 1, false);
    let mixed = run(&engine, &texts, &mut random, texts.len(), true);
    for (t, (alone, mixed)) in alone.iter().zip(&mixed).enumerate() {
        for (end, logits) in alone {
            let got = mixed.iter().find(|(at, _)| at == end).map(|(_, logits)| logits);
            assert!(got == Some(logits), "{}: text {t}, {end} tokens", path.display());
        }
    }
}

/// Evaluates rows of decode of several texts at once. Each session is at the position that its
/// text says, and gets the next `n` tokens of it.
fn step(engine: &Arc<Engine>, texts: &[Text], sessions: &mut [Session], n: &[usize]) {
    let next = sessions.iter_mut().zip(texts).zip(n).filter(|(_, n)| **n > 0);
    let mut rows = Vec::new();
    for ((session, text), n) in next {
        let past = session.n_past();
        let tokens = &text.tokens[past..past + n];
        rows.push(BatchRow { session, tokens, phase: Phase::Decode, want: Want::Last });
    }
    engine.eval_batch(&mut rows).unwrap();
}

/// Steps of several rows, of one text or of several, run as graphs that are captured once.
#[test]
fn steps_of_several_rows_are_graphs() {
    let dir = tempfile::tempdir().unwrap();
    for (seed, name) in ["qwen3moe", "deepseek_v3", "qwen3next", "gpt_oss"].into_iter().enumerate()
    {
        let path = convert_golden(name, ["q8_0", "f32"][seed % 2], dir.path());
        // Counted are the nodes of layers' graphs.
        let test = TestHooks { by_layer: true, ..Default::default() };
        let options = EngineOptions { test, ..on_device(seed as u64, [CacheType::F32; 2]) };
        let engine = load(&path, &options);
        let mut random = Random(seed as u64);
        let id = |_| random.below(200) as u32;
        let tokens: Vec<u32> = (0..39).map(id).collect();
        let texts = [0, 4, 8].map(|n| Text { tokens: tokens[n..n + 24].into(), n_prompt: 5 });
        let alone = run(&engine, &texts, &mut random, 1, false);
        let counts = || engine.graph_counts().unwrap();
        assert_eq!((counts().n_captured, counts().n_runs), (0, 0), "{name}");
        let mut sessions = texts.each_ref().map(|_| engine.new_session().unwrap());
        for (session, text) in sessions.iter_mut().zip(&texts) {
            session.eval(&text.tokens[..5], Want::Last).unwrap();
        }
        // A step's texts and their rows, and how often its graphs are captured and run in all.
        let steps = [
            ([1, 1, 1], 1, 1),
            ([1, 1, 1], 1, 2),
            ([0, 3, 0], 2, 3),
            ([2, 0, 1], 3, 4),
            ([1, 1, 1], 3, 5),
            ([0, 3, 0], 3, 6),
            ([4, 1, 3], 4, 7),
        ];
        let n_layers = counts().nodes.len();
        let n_routed = counts().nodes.iter().filter(|[_, experts]| *experts > 0).count();
        assert!(n_routed > 1, "{name}");
        for (n, n_captured, n_runs) in steps {
            step(&engine, &texts, &mut sessions, &n);
            let expected = (n_captured * n_layers, n_runs * n_layers);
            assert_eq!((counts().n_captured, counts().n_runs), expected, "{name}: {n:?}");
            assert_eq!(counts().n_looked_up, n_runs * n_routed, "{name}: {n:?}");
            for (t, session) in sessions.iter_mut().enumerate().filter(|(t, _)| n[*t] > 0) {
                let (mut got, end) = (Vec::new(), session.n_past());
                hear(&mut got, session, end);
                assert!(alone[t].contains(&got[0]), "{name}: text {t} after {n:?}");
            }
        }
        // Another text's cache may have the memory of one that is gone.
        drop(sessions);
        let mut sessions = texts.each_ref().map(|_| engine.new_session().unwrap());
        for (session, text) in sessions.iter_mut().zip(&texts) {
            session.eval(&text.tokens[..5], Want::Last).unwrap();
        }
        step(&engine, &texts, &mut sessions, &[1, 1, 1]);
        assert_eq!(counts().n_captured, 5 * n_layers, "{name}");
        let mut got = Vec::new();
        hear(&mut got, &mut sessions[2], 6);
        assert!(alone[2].contains(&got[0]), "{name}");
    }
}

#[test]
fn every_architecture() {
    let dir = tempfile::tempdir().unwrap();
    for (i, name) in MODELS.into_iter().enumerate() {
        let path = convert_golden(name, ["f32", "q8_0"][i % 2], dir.path());
        check(&path, &on_device(i as u64, [CacheType::F32; 2]), i as u64 + 1);
    }
}

/// Prompts go through tensor cores with some of these, however they are cut.
#[test]
fn every_cache_type() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "q8_0", dir.path());
    for (i, ty) in CacheType::ALL.into_iter().enumerate() {
        let other = CacheType::ALL[(i * 5 + 3) % CacheType::ALL.len()];
        let types = [if i == 0 { CacheType::F16 } else { ty }, other];
        check(&path, &on_device(i as u64, types), i as u64 + 1);
    }
}

/// Experts in part on the CPU, and layers on either side.
#[test]
fn on_either_side() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "q8_0", dir.path());
    let options = on_device(3, [CacheType::F32; 2]);
    let vram = "50%".parse().unwrap();
    check(&path, &EngineOptions { vram, ..options.clone() }, 5);
    check(&path, &EngineOptions { gpu_layers: Some(2), ..options }, 6);
}

/// The other text goes on when one of two is cancelled; both cancelled end the pass.
#[test]
fn one_of_two_is_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "q8_0", dir.path());
    let engine = load(&path, &on_device(4, [CacheType::F32; 2]));
    let mut sessions: Vec<_> = (0..2).map(|_| engine.new_session().unwrap()).collect();
    let cancels = [Cancel::new(), Cancel::new()];
    for (session, cancel) in sessions.iter_mut().zip(&cancels) {
        session.set_cancel(cancel.clone());
    }
    let mut eval = |tokens: &[u32]| {
        let rows = sessions.iter_mut().map(|session| BatchRow {
            session,
            tokens,
            phase: Phase::Prompt,
            want: Want::Last,
        });
        let result = engine.eval_batch(&mut rows.collect::<Vec<_>>());
        (result, sessions[0].n_past(), sessions[1].n_past())
    };
    assert!(matches!(eval(&[3, 4, 5]), (Ok(()), 3, 3)));
    cancels[0].cancel();
    assert!(matches!(eval(&[6, 7]), (Ok(()), 5, 5)));
    cancels[1].cancel();
    assert!(matches!(eval(&[8, 9]), (Err(Error::Interrupted), 5, 5)));
    assert!(engine.model().hierarchy().check_integrity());
}

/// The bits of each step of decode, one after the other.
fn in_steps(session: &mut Session, tokens: &[u32]) -> Vec<Vec<u32>> {
    let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect();
    tokens.iter().map(|id| bits(session.eval(&[*id], Want::Last).unwrap().all())).collect()
}

/// The same tokens as drafts of one step behind the first, and others, which are taken back.
fn check_drafts(name: &str, options: &EngineOptions) {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden(name, "f32", dir.path());
    let engine = load(&path, options);
    let mut session = engine.new_session().unwrap();
    session.eval(&[3, 1, 4, 1, 5, 9], Want::None).unwrap();
    let n_prompt = session.n_past();
    let expected = in_steps(&mut session, &[2, 6, 5, 3]);
    for tokens in [&[2, 6, 5, 3][..], &[2, 7, 1], &[2, 6, 5, 8]] {
        session.truncate(n_prompt);
        let row =
            BatchRow { session: &mut session, tokens, phase: Phase::Decode, want: Want::Last };
        engine.eval_batch(&mut [row]).unwrap();
        let n_right = tokens.iter().zip(&[2, 6, 5, 3]).take_while(|(a, b)| a == b).count();
        for (i, expected) in expected.iter().enumerate().take(n_right) {
            let bits: Vec<u32> =
                session.logits_of(i).all().iter().map(|logit| logit.to_bits()).collect();
            assert!(bits == *expected, "{name}: {tokens:?}, {i}");
        }
        assert_eq!(session.truncate(n_prompt + n_right), n_prompt + n_right);
        let rest = in_steps(&mut session, &[2, 6, 5, 3][n_right..]);
        assert!(rest == expected[n_right..], "{name}: behind {tokens:?}");
    }
}

#[test]
fn drafts_have_the_bits_of_single_steps() {
    let types = [CacheType::F16; 2];
    for (seed, name) in ["qwen3moe", "gpt_oss", "deepseek_v2", "glm4moe"].into_iter().enumerate() {
        check_drafts(name, &on_device(seed as u64, types));
    }
    // Half of the layers are on the CPU, and some experts in neither place.
    let options = EngineOptions { gpu_layers: Some(1), ..on_device(9, [CacheType::F32; 2]) };
    check_drafts("qwen3moe", &options);
}
