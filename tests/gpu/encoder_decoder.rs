//! Encoder–decoder models on the emulated device: both stacks' layers, attention to the encoder's
//! text, experts in VRAM and on the CPU, layers of either stack on either side.
//!
//! With an f32 cache every kernel has the CPU's bits, so logits are compared to the bit. Other
//! caches send the encoder's attention, and that of what the decoder is given at once, to tensor
//! cores.

use crate::support::{at_rest, choice, gpu_options};
use common::{convert_golden, golden_options, load, read_ids};
use moeba::backend::gpu::Emulated;
use moeba::backend::gpu::emulated::Config;
use moeba::engine::plan::ram::{RamBudget, VramBudget};
use moeba::engine::plan::vram::CpuMoe;
use moeba::engine::{
    CacheType, DeviceChoice, Engine, EngineOptions, Experts, MemoryPlan, Session, TestHooks,
};
use moeba::gguf::{Gguf, Override};
use moeba::model::Bound;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The numbers of tokens that the decoder gets at once, and one by one.
const BEGINNING: usize = 6;
const DECODED: usize = 3;

/// A source text and an answer.
struct Text {
    source: Vec<u32>,
    target: Vec<u32>,
}

/// Texts of 5 tokens and of more than experts take (`switch`) or few-token kernels do.
fn texts(name: &str) -> Vec<Text> {
    let text = |prompt: &str| {
        let dir = common::repo().join("tests/golden").join(name).join("expect");
        let mut target = read_ids(&dir.join(format!("{prompt}.decoder_tokens.json")));
        target.truncate(BEGINNING + DECODED);
        Text { source: read_ids(&dir.join(format!("{prompt}.tokens.json"))), target }
    };
    ["p70", "p5"].map(text).into()
}

fn on_device(seed: u64, vram: &str) -> EngineOptions {
    let device = choice(Config { seed, ..Config::default() });
    let vram = if vram.is_empty() { VramBudget::Auto } else { vram.parse().unwrap() };
    EngineOptions { device, vram, n_ctx: Some(80), ..golden_options() }
}

fn on_cpu() -> EngineOptions {
    EngineOptions { n_ctx: Some(80), ..golden_options() }
}

fn eval(session: &mut Session, tokens: &[u32], out: &mut Vec<f32>) {
    session.eval_all(tokens, &mut |_, l| out.extend_from_slice(l)).unwrap();
}

/// Logits of what is said to a text, handed over at once and then one by one.
fn say(session: &mut Session, target: &[u32], out: &mut Vec<f32>) {
    let (beginning, decoded) = target.split_at(BEGINNING);
    eval(session, beginning, out);
    decoded.chunks(1).for_each(|token| eval(session, token, out));
}

/// Logits of all texts, one after the other in one session.
fn answer(engine: &Arc<Engine>, texts: &[Text]) -> Vec<f32> {
    let mut session = engine.new_session().unwrap();
    let mut out = Vec::new();
    for text in texts {
        session.encode(&text.source).unwrap();
        say(&mut session, &text.target, &mut out);
    }
    drop(session);
    at_rest(engine, Duration::from_secs(60));
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The largest difference as a part of the largest value.
fn off(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    got.iter().zip(expected).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

/// 0 is to the bit.
fn expect_near(got: &[f32], expected: &[f32], bound: f32, what: &str) {
    let off = off(got, expected);
    eprintln!("{what}: off by {off:.1e} of the largest");
    match bound {
        0.0 => assert!(bits(got) == bits(expected), "{what}: off by {off:e}"),
        _ => assert!(off <= bound, "{what}: off by {off:e}"),
    }
}

fn agrees_with_the_cpu(name: &str) {
    let (dir, texts) = (tempfile::tempdir().unwrap(), texts(name));
    for ty in ["f32", "q8_0"] {
        let path = convert_golden(name, ty, dir.path());
        let expected = answer(&load(&path, &on_cpu()), &texts);
        let got = answer(&load(&path, &on_device(1, "")), &texts);
        expect_near(&got, &expected, 0.0, &format!("{name} {ty}"));
    }
}

#[test]
fn switch() {
    agrees_with_the_cpu("switch");
}

#[test]
fn switch_tied() {
    agrees_with_the_cpu("switch_tied");
}

#[test]
fn nllb_moe() {
    agrees_with_the_cpu("nllb_moe");
}

/// The bound for tensor cores, over all layers of both stacks, with weights in f32: integers round
/// their inputs, and a step more or less of that, or another expert, would hide the differences
/// that this test is for.
const PROMPT_BOUND: f32 = 3e-3;

#[test]
fn caches_of_other_types_are_near_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    // Heads as long as a block, which no golden model has.
    let two_heads = "nllb-moe.attention.head_count=int:2".parse::<Override>().unwrap();
    let cases = [
        ("switch", CacheType::F16, None),
        ("switch", CacheType::BF16, None),
        ("nllb_moe", CacheType::F16, None),
        ("nllb_moe", CacheType::Q8_0, Some(two_heads)),
    ];
    for (name, ty, other) in cases {
        let (path, texts) = (convert_golden(name, "f32", dir.path()), texts(name));
        let with = |options: EngineOptions| EngineOptions {
            cache_type_k: ty,
            cache_type_v: ty,
            overrides: other.iter().cloned().collect(),
            ..options
        };
        let expected = answer(&load(&path, &with(on_cpu())), &texts);
        let got = answer(&load(&path, &with(on_device(2, ""))), &texts);
        expect_near(&got, &expected, PROMPT_BOUND, &format!("{name}, a cache of {ty}"));
    }
}

fn plan(path: &Path) -> MemoryPlan {
    Engine::plan_of(path, &on_device(0, "")).unwrap()
}

/// Whoever computes an expert, wherever it lies, in whatever order the device runs, and wherever
/// the model is cut.
fn same_bits(name: &str) {
    let (dir, texts) = (tempfile::tempdir().unwrap(), texts(name));
    let path = convert_golden(name, "q8_0", dir.path());
    let expected = answer(&load(&path, &on_device(0, "100%")), &texts);
    let check = |what: &str, options: EngineOptions| {
        let got = answer(&load(&path, &options), &texts);
        expect_near(&got, &expected, 0.0, &format!("{name}: {what}"));
    };
    for seed in 1..4 {
        check("a seed", on_device(seed, "60%"));
    }
    let plan = plan(&path);
    let on_gpu = plan.device.as_ref().expect("on the device").plan.clone();
    let least = VramBudget::Bytes(on_gpu.expert_min_bytes);
    assert!(on_gpu.expert_min_bytes < on_gpu.expert_all_bytes);
    check("the least VRAM", EngineOptions { vram: least, ..on_device(4, "") });
    for share in [0.0, 0.4, 1.0] {
        let options = EngineOptions {
            test: TestHooks { cpu_share: Some(share), ..Default::default() },
            ..on_device(5, "60%")
        };
        check("a CPU share", options);
    }
    let ram = RamBudget::Bytes(plan.sizes.minimum_bytes);
    check("three tiers", EngineOptions { ram, ..on_device(7, "60%") });
    check("experts on the CPU", EngineOptions { cpu_moe: CpuMoe::All, ..on_device(2, "") });
    let device = DeviceChoice::Emulated(Config { devices: 2, seed: 6, ..Config::default() });
    check("two devices", EngineOptions { device, ..on_device(6, "60%") });
    // A text is read in one pass.
    check("micro-batches", EngineOptions { n_ubatch: Some(3), ..on_device(3, "60%") });
    for n in 2..=on_gpu.n_layers {
        let options = EngineOptions { gpu_layers: Some(n), ..on_device(n as u64, "") };
        check(&format!("-ngl {n}"), options);
    }
}

#[test]
fn bits_of_switch_do_not_depend_on_budget_share_order_or_place() {
    same_bits("switch");
}

#[test]
fn bits_of_nllb_do_not_depend_on_budget_share_order_or_place() {
    same_bits("nllb_moe");
}

/// Experts of both stacks, those without room among them, and the same logits as unrecorded.
#[test]
fn routing_is_the_cpus() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["switch", "nllb_moe"] {
        let (path, texts) = (convert_golden(name, "q8_0", dir.path()), texts(name));
        let recorded = |options: &EngineOptions| -> (Vec<Experts>, Vec<f32>) {
            let mut session = load(&path, options).new_session().unwrap();
            session.record_experts(true);
            let (mut experts, mut logits) = (Vec::new(), Vec::new());
            for text in &texts {
                session.encode(&text.source).unwrap();
                experts.push(session.take_experts());
                say(&mut session, &text.target, &mut logits);
                experts.push(session.take_experts());
            }
            (experts, logits)
        };
        let device = on_device(3, "60%");
        let (expected, _) = recorded(&on_cpu());
        let (got, logits) = recorded(&device);
        assert_eq!(got, expected, "{name}");
        assert!(bits(&logits) == bits(&answer(&load(&path, &device), &texts)), "{name}");
        let of_layers = || expected[0].ids.chunks(expected[0].tokens * expected[0].k);
        let is_full = |ids: &[i32]| ids.contains(&-1) && ids.iter().any(|id| *id >= 0);
        assert_eq!(of_layers().any(is_full), name == "switch", "{name}: a text that fills experts");
    }
}

/// Two sessions in turns, and an answer that is taken back and given again.
#[test]
fn sessions_have_their_own_texts() {
    let (dir, texts) = (tempfile::tempdir().unwrap(), texts("switch"));
    let path = convert_golden("switch", "q8_0", dir.path());
    let engine = load(&path, &on_device(9, "60%"));
    let alone = texts.iter().map(|text| answer(&engine, std::slice::from_ref(text)));
    let alone: Vec<Vec<u32>> = alone.map(|logits| bits(&logits)).collect();
    let mut sessions: Vec<Session> = texts.iter().map(|_| engine.new_session().unwrap()).collect();
    for (session, text) in sessions.iter_mut().zip(&texts) {
        session.encode(&text.source).unwrap();
    }
    for _ in 0..2 {
        let mut said = vec![Vec::new(); texts.len()];
        for start in [0].into_iter().chain(BEGINNING..BEGINNING + DECODED) {
            let end = BEGINNING.max(start + 1);
            for ((session, text), said) in sessions.iter_mut().zip(&texts).zip(&mut said) {
                eval(session, &text.target[start..end], said);
            }
        }
        for ((said, alone), session) in said.iter().zip(&alone).zip(&mut sessions) {
            assert!(bits(said) == *alone);
            assert_eq!(session.truncate(0), 0);
        }
    }
}

/// The allocation is the planned one, or a little smaller.
#[test]
fn no_more_is_taken_than_planned() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["switch", "nllb_moe", "kimi-k3", "glm5-next", "qwen4exp"] {
        let path = convert_golden(name, "q8_0", dir.path());
        for n in [2, 4, 99] {
            let options = EngineOptions { gpu_layers: Some(n), ..on_device(0, "") };
            let part = Engine::plan_of(&path, &options).unwrap().device.expect("on the device");
            let gpu = Emulated::devices(&Config::default()).remove(0);
            let before = gpu.memory().unwrap().free_bytes;
            let mut model = Bound::new(Gguf::open_with(&path, &[]).unwrap()).unwrap().in_place();
            let loaded =
                model.onto(std::slice::from_ref(&gpu), &gpu_options(&part.plan, 80)).unwrap();
            let _cache = loaded.new_cache(&model, 80, [CacheType::F32; 2]).unwrap();
            let taken = (before - gpu.memory().unwrap().free_bytes) as u64;
            let planned = part.plan.planned_bytes(0);
            let what = format!("{name} -ngl {n}: {taken} bytes of {planned}");
            assert!(taken <= planned && taken > planned / 10 * 9, "{what}");
        }
    }
}
