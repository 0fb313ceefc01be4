//! Whole random models of every architecture on the emulated device: the layer loop, the KV cache,
//! the VRAM tier and its link, CPU and GPU at work together.
//!
//! Kernels have the CPU's bits but for prompts' attention on tensor cores, so logits are compared
//! within a bound there and to the bit everywhere else; and to the bit across budgets, CPU shares,
//! splits of the layers and stream orders.

use crate::support::{at_rest, choice, gpu_options};
use common::{POLICIES, convert_golden, golden_options, load};
use moeba::backend::gpu::Emulated;
use moeba::backend::gpu::emulated::Config;
use moeba::engine::plan::ram::{RamBudget, VramBudget};
use moeba::engine::plan::vram::CpuMoe;
use moeba::engine::{CacheType, DeviceChoice, Engine, EngineOptions, TestHooks, Want};
use moeba::gguf::Gguf;
use moeba::model::Bound;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The length of the prompt: more than the kernels of few tokens take.
const PROMPT: usize = 11;
const DECODED: usize = 3;

fn emulated(seed: u64) -> DeviceChoice {
    choice(Config { seed, ..Config::default() })
}

fn on_device(seed: u64, vram: &str) -> EngineOptions {
    let vram = if vram.is_empty() { VramBudget::Auto } else { vram.parse().unwrap() };
    EngineOptions { device: emulated(seed), vram, n_ctx: Some(32), ..golden_options() }
}

fn on_cpu() -> EngineOptions {
    EngineOptions { n_ctx: Some(32), ..golden_options() }
}

fn tokens() -> Vec<u32> {
    (0..PROMPT + DECODED).map(|i| 3 + (i as u32 * 37) % 90).collect()
}

/// Logits of a prompt and of tokens decoded one by one.
fn answer(engine: &Arc<Engine>) -> Vec<f32> {
    answer_after(engine, PROMPT)
}

/// Logits after the same tokens, of which the first `n_prompt` are the prompt.
fn answer_after(engine: &Arc<Engine>, n_prompt: usize) -> Vec<f32> {
    answer_to(engine, &tokens(), n_prompt)
}

fn answer_to(engine: &Arc<Engine>, tokens: &[u32], n_prompt: usize) -> Vec<f32> {
    let (mut session, mut out) = (engine.new_session().unwrap(), Vec::new());
    let (prompt, decoded) = tokens.split_at(n_prompt);
    if n_prompt > 0 {
        session.eval_all(prompt, &mut |_, l| out.extend_from_slice(l)).unwrap();
    }
    for token in decoded {
        out.extend_from_slice(session.eval(&[*token], Want::Last).unwrap().all());
    }
    drop(session);
    at_rest(engine, Duration::from_secs(20));
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn is_there(path: &Path) -> bool {
    match Engine::plan_of(path, &on_device(0, "")) {
        Ok(_) => true,
        Err(why) if why.to_string().contains("C++") => {
            eprintln!("skipped: {why}");
            false
        }
        Err(why) => panic!("{why}"),
    }
}

/// `bound`: of the largest logit, how far they may be off; 0 is to the bit.
fn agrees_with_the_cpu(name: &str, ty: &str, bound: f32) {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden(name, ty, dir.path());
    if !is_there(&path) {
        return;
    }
    let cpu = load(&path, &on_cpu());
    let expected = answer(&cpu);
    let device = load(&path, &on_device(1, ""));
    let got = answer(&device);
    compare(&format!("{name} {ty}"), &got, &expected, bound);
}

fn compare(what: &str, got: &[f32], expected: &[f32], bound: f32) {
    let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    let worst = expected.iter().zip(got).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    eprintln!("{what}: off by {:.1e} of the largest", worst / largest);
    match bound {
        0.0 => assert!(bits(expected) == bits(got), "{what}: off by {worst} of {largest}"),
        _ => assert!(worst <= bound * largest, "{what}: off by {worst} of {largest}"),
    }
}

macro_rules! agree {
    ($($test:ident: $bound:expr, [$($name:expr),+];)+) => {$(
        #[test]
        fn $test() {
            for name in [$($name),+] {
                agrees_with_the_cpu(name, "f32", $bound);
                agrees_with_the_cpu(name, "q8_0", $bound);
            }
        }
    )+};
}

agree! {
    llama: 0.0, ["llama", "llama_tied", "llama3_rope"];
    dense_qwen: 0.0, ["qwen2", "qwen3"];
    qwen2moe: 0.0, ["qwen2moe", "qwen2moe_mixed"];
    qwen3moe: 0.0, ["qwen3moe", "qwen3moe_mixed"];
    qwen3next: 0.0, ["qwen3next", "qwen35moe"];
    mixtral: 0.0, ["mixtral"];
    olmoe: 0.0, ["olmoe"];
    granitemoe: 0.0, ["granitemoe"];
    phimoe: 0.0, ["phimoe"];
    gpt_oss: 0.0, ["gpt_oss", "gpt_oss_mxfp4"];
    deepseek: 0.0, ["deepseek"];
    deepseek2: 0.0, ["deepseek_v2_lite", "deepseek_v2", "deepseek_v3"];
    deepseek2_of_others: 0.0, ["moonlight", "glm4_moe_lite"];
    glm4moe: 0.0, ["glm4moe", "glm4moe_air"];
    dots1: 0.0, ["dots1"];
    arctic: 0.0, ["arctic", "arctic_mixed"];
    afmoe: 0.0, ["afmoe"];
    bailingmoe: 0.0, ["bailingmoe", "bailingmoe2"];
    ernie4_5_moe: 0.0, ["ernie4_5-moe"];
    exaone_moe: 0.0, ["exaone-moe"];
    hunyuan_moe: 0.0, ["hunyuan-moe", "hy_v3"];
    mellum: 0.0, ["mellum"];
    minimax_m2: 0.0, ["minimax-m2"];
    mistral: 0.0, ["mistral3", "mistral4"];
    cohere2moe: 0.0, ["cohere2moe"];
    dense_granite: 0.0, ["granite", "minicpm"];
    qwen3vlmoe: 0.0, ["qwen3vlmoe"];
    dbrx: 0.0, ["dbrx"];
    grok: 0.0, ["grok"];
    llama4: 0.0, ["llama4_hf"];
    smallthinker: 0.0, ["smallthinker", "maple"];
    listed_windows: 0.0, ["flint", "flint_softmax", "granite_swa", "granite_swa_merged"];
    norms_around_parts: 0.0, ["kolibri1", "maion-coder", "beam", "beam_softmax"];
    norms_of_parts: 0.0, ["k2-horizon", "k2-horizon_softmax", "k2-horizon_mova"];
    heads_of_layers: 0.0, ["laguna", "mimo2", "step35"];
    short_convolutions: 0.0, ["lfm2moe"];
    scans: 0.0, ["granitehybrid", "nemotron_h_moe", "minimax-01", "jamba"];
    kda: 0.0, ["kimi-linear", "bailingmoe3"];
    norms_around_branches: 0.0, ["gemma4", "gemma4_hf"];
    keys_of_others_and_inputs_of_layers: 0.0, ["gemma4_dense_hf", "gemma4_shared_hf"];
    scores_that_fall_with_the_distance: 0.0, ["refact"];
    tokens_that_see_the_whole_text: 0.0, ["llada-moe", "rnd1"];
    experts_behind_the_routed_ones: 0.0, ["grovemoe"];
    latent_attention_that_an_indexer_shows: 0.0, ["deepseek32", "glm-dsa", "dots3note", "hy_v4"];
    latent_rows_of_others: 0.0, ["mistral-large4", "mistral-large4_yarn"];
    blocks_that_an_indexer_shows: 0.0, ["minimax-m3"];
    several_streams: 0.0, ["kimi-k3", "deepseek4", "glm5-next", "qwen4exp"];
}

/// Attention to compressed rows: blocks of 4 positions, of which an indexer sees all or chooses,
/// and of 128; in one pass, in parts, and by single tokens; over caches of any type.
#[test]
fn compressed_rows() {
    let dir = tempfile::tempdir().unwrap();
    let text: Vec<u32> = (0..130).map(|i| 3 + (i * 37) % 90).collect();
    let long = |engine: &Arc<Engine>| bits(&answer_to(engine, &text, 126));
    // Tokens see all blocks until they see 9, of which 8 are chosen.
    let short = |engine: &Arc<Engine>| bits(&answer_to(engine, &text[..40], 31));
    let cases = [("deepseek4", CacheType::F32, 2), ("deepseek4_hf", CacheType::F16, 3)];
    for (name, cache, n_gpu_layers) in cases {
        let path = convert_golden(name, "q8_0", dir.path());
        if !is_there(&path) {
            return;
        }
        let mut answers = Vec::new();
        for top_k in [64, 8] {
            let key = format!("deepseek4.attention.indexer.top_k=int:{top_k}");
            let with = |options: EngineOptions| {
                let (overrides, exact) = (vec![key.parse().unwrap()], true);
                let (k, v, n_ctx) = (cache, cache, Some(160));
                let options = EngineOptions { cache_type_k: k, cache_type_v: v, ..options };
                load(&path, &EngineOptions { overrides, n_ctx, exact, ..options })
            };
            let (cpu, device) = (with(on_cpu()), with(on_device(1, "")));
            let plan = &device.plan().device.as_ref().unwrap().plan;
            assert_eq!((plan.n_cpu_only, plan.gpu_layers.start), (0, 0), "{name}");
            let expected = long(&cpu);
            assert!(long(&device) == expected, "{name}, {top_k} blocks, cache of {cache}");
            if top_k == 8 {
                let expected = short(&cpu);
                let parts = EngineOptions { n_ubatch: Some(10), ..on_device(2, "60%") };
                assert!(short(&with(parts)) == expected, "{name} in parts");
                let part = EngineOptions { gpu_layers: Some(n_gpu_layers), ..on_device(3, "30%") };
                assert!(short(&with(part)) == expected, "{name}, layers on the CPU");
            }
            answers.push(expected);
        }
        assert!(answers[0] != answers[1], "{name}: an indexer has chosen");
    }
}

/// Models of which no layer is left to the CPU.
const WITHOUT_CPU: [&str; 26] = [
    "lfm2moe",
    "kimi-linear",
    "kimi-k3",
    "bailingmoe3",
    "granitehybrid",
    "nemotron_h_moe",
    "minimax-01",
    "jamba",
    "gemma4",
    "gemma4_hf",
    "gemma4_dense_hf",
    "gemma4_shared_hf",
    "refact",
    "llada-moe",
    "rnd1",
    "grovemoe",
    "deepseek32",
    "glm-dsa",
    "mistral-large4",
    "mistral-large4_yarn",
    "dots3note",
    "hy_v4",
    "minimax-m3",
    "deepseek4",
    "glm5-next",
    "qwen4exp",
];

#[test]
fn all_layers_have_kernels() {
    let dir = tempfile::tempdir().unwrap();
    for name in WITHOUT_CPU {
        let path = convert_golden(name, "q8_0", dir.path());
        let plan = load(&path, &on_device(0, "")).plan().device.clone().unwrap().plan;
        assert_eq!((plan.n_cpu_only, plan.gpu_layers.start), (0, 0), "{name}");
    }
}

/// Sinks, norms of keys and layers of sizes of their own, in contexts of which all is seen.
#[test]
fn latent_attention_sees_a_short_context() {
    let dir = tempfile::tempdir().unwrap();
    for (name, ty) in ["hy_v4", "dots3note"].into_iter().flat_map(|n| [(n, "f32"), (n, "q8_0")]) {
        let path = convert_golden(name, ty, dir.path());
        if !is_there(&path) {
            return;
        }
        let short = |base| load(&path, &EngineOptions { n_ctx: Some(6), ..base });
        let (cpu, device) = (short(on_cpu()), short(on_device(1, "")));
        assert_eq!(device.plan().device.as_ref().unwrap().plan.n_cpu_only, 0, "{name}");
        let answer = |engine| bits(&answer_to(engine, &tokens()[..6], 4));
        assert!(answer(&cpu) == answer(&device), "{name} {ty}");
    }
}

/// A layer whose keys are another's stays where that one is.
#[test]
fn keys_are_shared_on_one_device() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("gemma4_shared_hf", "q8_0", dir.path());
    if !is_there(&path) {
        return;
    }
    let cpu = load(&path, &EngineOptions { n_ctx: Some(32), ..golden_options() });
    let expected = bits(&answer(&cpu));
    // Layers 3 and 4 see the keys of 2 and 1.
    for (n, n_cpu_only) in [(2, 1), (3, 2), (4, 1), (5, 0), (6, 0)] {
        let options = EngineOptions { gpu_layers: Some(n), ..on_device(n as u64, "") };
        let engine = load(&path, &options);
        let plan = &engine.plan().device.as_ref().unwrap().plan;
        assert_eq!((plan.gpu_layers.start, plan.n_cpu_only), (6 - n, n_cpu_only), "-ngl {n}");
        assert!(bits(&answer(&engine)) == expected, "-ngl {n}");
    }
}

/// No more is taken than planned, and not much less.
#[test]
fn devices_take_what_is_planned() {
    let dir = tempfile::tempdir().unwrap();
    for name in WITHOUT_CPU {
        let path = convert_golden(name, "q8_0", dir.path());
        if !is_there(&path) {
            return;
        }
        let options = on_device(0, "100%");
        let plan = Engine::plan_of(&path, &options).unwrap().device.unwrap().plan;
        let gpu = Emulated::devices(&Config::default()).remove(0);
        let before = gpu.memory().unwrap().free_bytes;
        let mut model = Bound::new(Gguf::open_with(&path, &[]).unwrap()).unwrap().in_place();
        let loaded = model.onto(std::slice::from_ref(&gpu), &gpu_options(&plan, 32)).unwrap();
        let _cache = loaded.new_cache(&model, 32, [CacheType::F32; 2]).unwrap();
        let taken = (before - gpu.memory().unwrap().free_bytes) as u64;
        let planned = plan.planned_bytes(0);
        let what = format!("{name}: {taken} bytes of {planned}");
        eprintln!("{what}");
        assert!(taken <= planned && taken > planned / 10 * 9, "{what}");
    }
}

/// Micro-batches that end among the rows that see all, and layers whose choice another one shares.
#[test]
fn what_an_indexer_chooses_does_not_depend_on_division() {
    let dir = tempfile::tempdir().unwrap();
    // Layer 3 sees what layer 2 has chosen, and 1 what 0 has; so many layers on the device have a
    // leader on the CPU. With minimax-m3 each chooses for itself.
    let shared = &[(2, 1), (3, 0), (4, 1), (5, 0)][..];
    let each = &[(2, 0), (3, 0), (4, 0)][..];
    // Layer 4 sees rows of 2 and the choice of 3, layer 5 rows of 3, and 1 both of 0.
    let rows = &[(2, 1), (3, 2), (4, 3), (5, 0), (6, 1), (7, 0)][..];
    let cases =
        [("glm-dsa", shared), ("hy_v4", shared), ("minimax-m3", each), ("mistral-large4", rows)];
    for (name, parts) in cases {
        let path = convert_golden(name, "q8_0", dir.path());
        if !is_there(&path) {
            return;
        }
        let expected = bits(&answer(&load(&path, &on_cpu())));
        let check = |what: &str, n_cpu_only: usize, options: EngineOptions| {
            let engine = load(&path, &options);
            let plan = &engine.plan().device.as_ref().unwrap().plan;
            assert_eq!(plan.n_cpu_only, n_cpu_only, "{name}: {what}");
            assert!(bits(&answer(&engine)) == expected, "{name}: {what}");
        };
        for (n, n_cpu_only) in parts.iter().copied() {
            let options = EngineOptions { gpu_layers: Some(n), ..on_device(n as u64, "") };
            check("layers on the CPU", n_cpu_only, options);
        }
        for n in [3, 5] {
            let options = EngineOptions { n_ubatch: Some(n), ..on_device(n as u64, "50%") };
            check("micro-batches", 0, options);
        }
    }
}

/// Experts of which each has an input of its own, h times its weight: who computes which does not
/// matter.
#[test]
fn several_experts_with_an_input_each() {
    let dir = tempfile::tempdir().unwrap();
    for ty in ["f32", "q8_0"] {
        let path = convert_golden("llama4_hf", ty, dir.path());
        if !is_there(&path) {
            return;
        }
        let with = |options| {
            let overrides = vec!["llama4.expert_used_count=int:3".parse().unwrap()];
            load(&path, &EngineOptions { overrides, ..options })
        };
        let cpu = with(on_cpu());
        let expected = bits(&answer(&cpu));
        assert!(expected != bits(&answer(&load(&path, &on_cpu()))), "three experts are one");
        let n_layers = cpu.model().hyper().n_layers;
        let check = |what: &str, options: EngineOptions| {
            let engine = with(options);
            let plan = &engine.plan().device.as_ref().unwrap().plan;
            assert!(plan.n_cpu_only == 0, "{what}: layers have kernels");
            assert!(bits(&answer(&engine)) == expected, "{ty}: {what}");
        };
        check("all experts in VRAM", on_device(1, "100%"));
        for seed in 2..4 {
            check("some experts in VRAM", on_device(seed, "50%"));
        }
        for share in [0.0, 0.5] {
            let test = TestHooks { cpu_share: Some(share), ..Default::default() };
            check("a CPU share", EngineOptions { test, ..on_device(4, "40%") });
        }
        check("micro-batches", EngineOptions { n_ubatch: Some(3), ..on_device(5, "60%") });
        check("experts on the CPU", EngineOptions { cpu_moe: CpuMoe::All, ..on_device(6, "") });
        let two = choice(Config { devices: 2, seed: 8, ..Config::default() });
        check("two devices", EngineOptions { device: two, ..on_device(8, "70%") });
        let part = EngineOptions { gpu_layers: Some(n_layers - 2), ..on_device(7, "50%") };
        check("layers on the CPU", part);
    }
}

/// All streams move where a model is divided, wherever that is.
#[test]
fn several_streams_do_not_depend_on_division_or_budget() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["kimi-k3", "deepseek4", "glm5-next", "qwen4exp"] {
        let path = convert_golden(name, "q8_0", dir.path());
        if !is_there(&path) {
            return;
        }
        let cpu = load(&path, &on_cpu());
        let (expected, n_layers) = (bits(&answer(&cpu)), cpu.model().hyper().n_layers);
        let check = |what: &str, options: EngineOptions| {
            assert!(bits(&answer(&load(&path, &options))) == expected, "{name}: {what}");
        };
        for n in 1..=n_layers + 1 {
            let options = EngineOptions { gpu_layers: Some(n), ..on_device(n as u64, "60%") };
            let part = load(&path, &options).plan().device.clone();
            let n_cpu_only = part.map_or(0, |part| part.plan.n_cpu_only);
            assert!(n_cpu_only < n_layers, "{name}: no layer has kernels");
            check("layers on the CPU", options);
        }
        check("micro-batches", EngineOptions { n_ubatch: Some(3), ..on_device(3, "50%") });
        check("experts on the CPU", EngineOptions { cpu_moe: CpuMoe::All, ..on_device(2, "") });
    }
}

/// Over a cache of fewer bits, attention of prompts is on tensor cores: within a bound, and so is
/// what is decoded behind it. Tokens that are decoded from the first one on have the CPU's bits.
fn with_cache(name: &str, cache: CacheType) {
    let dir = tempfile::tempdir().unwrap();
    // Of weights in f32: integers round what they read, and a step more or less of it, or another
    // expert, is more than what is to be seen here.
    let path = convert_golden(name, "f32", dir.path());
    if !is_there(&path) {
        return;
    }
    // For the same reason: of 8 bits, the next layer's keys and values take steps; of 4 bits, steps
    // of which one is up to 0.06 of the largest logit.
    let bound = match cache {
        CacheType::F16 => 2e-3,
        CacheType::Q8_0 => 1e-2,
        _ => 0.2,
    };
    let cached = |base| EngineOptions { cache_type_k: cache, cache_type_v: cache, ..base };
    let cpu = EngineOptions { n_ctx: Some(32), ..golden_options() };
    let (cpu, device) = (load(&path, &cached(cpu)), load(&path, &cached(on_device(1, ""))));
    for (n_prompt, bound) in [(0, 0.0), (PROMPT, bound)] {
        let [expected, got] = [&cpu, &device].map(|engine| answer_after(engine, n_prompt));
        let what = format!("{name}, cache of {cache}, prompt of {n_prompt}");
        compare(&what, &got, &expected, bound);
    }
    let exact = load(&path, &EngineOptions { exact: true, ..cached(on_device(1, "")) });
    assert!(exact.is_exact() && !device.is_exact());
    let what = format!("{name}, cache of {cache}, an exact prompt of {PROMPT}");
    compare(&what, &answer(&exact), &answer(&cpu), 0.0);
}

#[test]
fn caches_of_fewer_bits() {
    with_cache("qwen3moe", CacheType::F16);
    with_cache("qwen3moe", CacheType::Q8_0);
    with_cache("qwen3moe", CacheType::Q4_0);
    with_cache("qwen3moe", CacheType::IQ4_NL);
    with_cache("gpt_oss", CacheType::F16);
    with_cache("deepseek_v3", CacheType::F16);
}

/// Matrices of halves: prompts within a bound, however they are divided; the CPU's bits in decode,
/// and with `--exact`.
#[test]
fn weights_of_halves() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("qwen3moe", "f16", 2e-3),
        ("qwen3moe", "bf16", 1e-2),
        ("deepseek_v3", "f16", 2e-3),
        // A recurrence carries on what is rounded.
        ("qwen3next", "bf16", 5e-2),
    ];
    for (name, ty, bound) in cases {
        let path = convert_golden(name, ty, dir.path());
        if !is_there(&path) {
            return;
        }
        let (cpu, device) = (load(&path, &on_cpu()), load(&path, &on_device(1, "")));
        assert!(cpu.is_exact() && !device.is_exact());
        for (n_prompt, bound) in [(0, 0.0), (PROMPT, bound)] {
            let [expected, got] = [&cpu, &device].map(|engine| answer_after(engine, n_prompt));
            compare(&format!("{name} {ty}, prompt of {n_prompt}"), &got, &expected, bound);
        }
        let parts = load(&path, &EngineOptions { n_ubatch: Some(3), ..on_device(2, "") });
        assert!(bits(&answer(&parts)) == bits(&answer(&device)), "{name} {ty} in parts");
        let some = EngineOptions { test: with_cpu(), ..on_device(4, "50%") };
        let two = choice(Config { devices: 2, seed: 5, ..Config::default() });
        let two = EngineOptions { device: two, ..on_device(5, "50%") };
        for (what, options) in [("half of the experts", some), ("two devices", two)] {
            let got = bits(&answer(&load(&path, &options)));
            assert!(got == bits(&answer(&device)), "{name} {ty}, {what}");
        }
        let exact = load(&path, &EngineOptions { exact: true, ..on_device(3, "") });
        compare(&format!("{name} {ty}, exact"), &answer(&exact), &answer(&cpu), 0.0);
        if name == "qwen3moe" {
            products_of_halves(&device, &format!("{name} {ty}"));
        }
    }
}

/// The CPU computes experts that are missing, where it takes part.
fn with_cpu() -> TestHooks {
    TestHooks { cpu_share: Some(1.0), ..Default::default() }
}

/// Gate, up and down of all of a layer's experts are a launch each, once all experts are in VRAM
/// and the device groups their pairs. No other test here runs these kernels.
fn products_of_halves(engine: &Arc<Engine>, what: &str) {
    let start = Instant::now();
    loop {
        let counted = || {
            let n_grouped = engine.graph_counts().unwrap().n_grouped;
            [n_grouped, Emulated::launches_of("matmul_halves_grouped")]
        };
        let before = counted();
        let mut session = engine.new_session().unwrap();
        session.eval_all(&tokens()[..PROMPT], &mut |_, _| {}).unwrap();
        let after = counted();
        let [layers, launches] = [0, 1].map(|i| after[i] - before[i]);
        // A layer that lacks experts has launches, too, but the host groups its pairs.
        if layers > 0 && launches == 3 * layers {
            break;
        }
        let is_late = start.elapsed() > Duration::from_secs(60);
        assert!(!is_late, "{what}: {launches} launches, {layers} layers");
        answer(engine);
    }
}

/// Prompts of latent attention with keys and values of the heads, which are made of the cached
/// rows: behind a past too, and a part of the positions at a time.
#[test]
fn latent_attention_among_keys_of_the_heads() {
    let dir = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..131).map(|i| 3 + (i * 37) % 90).collect();
    let of = |name| {
        let path = convert_golden(name, "f32", dir.path());
        let cache = CacheType::F16;
        let cached = |base: EngineOptions| EngineOptions {
            cache_type_k: cache,
            cache_type_v: cache,
            n_ctx: Some(160),
            n_ubatch: Some(64),
            ..base
        };
        let load = |base| load(&path, &cached(base));
        let (cpu, device) = (load(on_cpu()), load(on_device(1, "")));
        let exact = load(EngineOptions { exact: true, ..on_device(2, "") });
        let [expected, got, exact] =
            [&cpu, &device, &exact].map(|engine| answer_to(engine, &tokens, 128));
        compare(name, &got, &expected, 2e-3);
        compare(&format!("{name}, exact"), &exact, &expected, 0.0);
    };
    if !is_there(&convert_golden("deepseek_v3", "f32", dir.path())) {
        return;
    }
    of("deepseek_v3");
    let ran = Emulated::launched_kernels();
    let has = |name: &str| ran.iter().any(|ran| ran == name);
    assert!(has("expand_keys") && has("expand_values"));
    ["deepseek_v2_lite", "mistral4", "kimi-linear", "dots3note"].into_iter().for_each(of);
}

/// Whoever computes an expert, wherever it lies, and in whatever order the device runs.
fn same_bits(name: &str, ty: &str, cache: CacheType) {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden(name, ty, dir.path());
    if !is_there(&path) {
        return;
    }
    let cached = |base| EngineOptions { cache_type_k: cache, cache_type_v: cache, ..base };
    let expected = bits(&answer(&load(&path, &cached(on_device(0, "100%")))));
    let check = |what: &str, options: EngineOptions| {
        let got = bits(&answer(&load(&path, &cached(options))));
        assert!(got == expected, "{name} {ty}, cache of {cache}: {what}");
    };
    for seed in 1..4 {
        check("a seed", on_device(seed, "60%"));
    }
    for share in [0.0, 0.4, 1.0] {
        check(
            "a CPU share",
            EngineOptions {
                test: TestHooks { cpu_share: Some(share), ..Default::default() },
                ..on_device(5, "50%")
            },
        );
    }
    for name in POLICIES {
        let policy = name.parse().unwrap();
        check(name, EngineOptions { policy, ..on_device(6, "50%") });
    }
    let least = load(&path, &on_device(0, "")).plan().sizes.minimum_bytes;
    let ram = RamBudget::Bytes(least);
    check("three tiers", EngineOptions { ram, ..on_device(7, "50%") });
    check("experts on the CPU", EngineOptions { cpu_moe: CpuMoe::All, ..on_device(2, "") });
    check("micro-batches", EngineOptions { n_ubatch: Some(3), ..on_device(3, "60%") });
    // Of fewer bits, prompts' attention is on tensor cores where it is on the device.
    if cache == CacheType::F32 {
        check("layers on the CPU", EngineOptions { gpu_layers: Some(2), ..on_device(4, "") });
    }
}

/// A prompt uses most experts of a layer, so the next layer's come while this one is computed.
#[test]
fn prompts_prefetch_their_next_layer_and_keep_their_bits() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["qwen3moe", "gpt_oss"] {
        let path = convert_golden(name, "q8_0", dir.path());
        if !is_there(&path) {
            return;
        }
        let expected = bits(&answer(&load(&path, &on_device(0, "100%"))));
        for (i, vram) in ["50%", "60%", "75%"].into_iter().enumerate() {
            // Nothing is predicted, and all layer prefetches have landed when their layer comes.
            let policy = "on-demand".parse().unwrap();
            let options = EngineOptions {
                policy,
                test: TestHooks { lockstep: true, ..Default::default() },
                ..on_device(i as u64, vram)
            };
            let engine = load(&path, &options);
            assert!(bits(&answer(&engine)) == expected, "{name} with {vram}");
            let counters = engine.expert_counters().unwrap();
            assert!(counters.prefetch_used_bytes > 0, "{name} with {vram}: {counters:?}");
        }
    }
}

/// Predictions of two layers ahead have a layer's time to come, so that the device finds them by
/// itself. Without predictions nothing is prefetched.
#[test]
fn prefetched_experts_are_found_when_their_layer_comes() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3moe", "q8_0", dir.path());
    if !is_there(&path) {
        return;
    }
    let expected = bits(&answer_after(&load(&path, &on_device(0, "100%")), 0));
    let found = |policy: &str| {
        // What is missing is loaded, and what is predicted has landed when its layer comes.
        let test = TestHooks { lockstep: true, cpu_share: Some(0.0), ..Default::default() };
        let policy = policy.parse().unwrap();
        let engine = load(&path, &EngineOptions { policy, test, ..on_device(1, "50%") });
        assert!(bits(&answer_after(&engine, 0)) == expected, "{policy}");
        let counters = engine.expert_counters().unwrap();
        eprintln!("{policy}: {counters:?}");
        // Evictions hear of a layer's routing before its hits and misses make them name victims.
        assert_eq!(counters.unheard_steps, 0, "{policy}");
        (counters.hits_prefetched, counters.misses)
    };
    let (none, misses) = found("predictor=none,eviction=lru");
    assert_eq!(none, 0);
    for predictor in ["next-layer", "trajectory"] {
        let (hits, left) = found(&format!("predictor={predictor},eviction=lru"));
        assert!(hits > 0 && left < misses, "{predictor}: {hits} found, {left} of {misses} missed");
    }
}

#[test]
fn bits_do_not_depend_on_budget_share_order_or_place() {
    same_bits("qwen3moe", "q8_0", CacheType::F32);
    same_bits("gpt_oss", "q8_0", CacheType::F32);
}

#[test]
fn nor_do_they_over_the_cache_that_is_the_default() {
    same_bits("qwen3moe", "q8_0", CacheType::F16);
}

#[test]
fn latent_attention_and_groups_do_not_depend_on_them_either() {
    same_bits("deepseek_v3", "q8_0", CacheType::F32);
}

#[test]
fn nor_do_experts_behind_the_routed_ones() {
    same_bits("grovemoe", "q8_0", CacheType::F32);
}

#[test]
fn nor_do_layers_with_inputs_of_their_own() {
    same_bits("gemma4_hf", "q8_0", CacheType::F32);
    same_bits("gemma4_shared_hf", "q8_0", CacheType::F32);
}
