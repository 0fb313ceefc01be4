//! Several devices, each with its own experts: whichever has an expert, and however many there are,
//! the bits are those of one device and of the CPU.

use crate::support::{at_rest, choice};
use common::{POLICIES, convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::plan::ram::{RamBudget, VramBudget};
use moeba::engine::plan::vram::CpuMoe;
use moeba::engine::{CacheType, DeviceChoice, Engine, EngineOptions, TestHooks, Want};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The length of the prompt: more than the kernels of few tokens take.
const PROMPT: usize = 11;
const DECODED: usize = 4;

fn on(devices: usize, seed: u64, vram: &str) -> EngineOptions {
    let device = choice(Config { devices, seed, ..Config::default() });
    let vram = if vram.is_empty() { VramBudget::Auto } else { vram.parse().unwrap() };
    EngineOptions { device, vram, n_ctx: Some(32), ..golden_options() }
}

/// Bits of the logits of a prompt and of tokens decoded one by one.
fn answer(engine: &Arc<Engine>) -> Vec<u32> {
    let mut session = engine.new_session().unwrap();
    let all: Vec<u32> = (0..PROMPT + DECODED).map(|i| 3 + (i as u32 * 37) % 90).collect();
    let (prompt, decoded) = all.split_at(PROMPT);
    let mut out = Vec::new();
    let mut keep = |logits: &mut [f32]| out.extend(logits.iter().map(|v| v.to_bits()));
    session.eval_all(prompt, &mut |_, logits| keep(logits)).unwrap();
    for token in decoded {
        keep(session.eval(&[*token], Want::Last).unwrap().all());
    }
    drop(session);
    at_rest(engine, Duration::from_secs(60));
    out
}

/// None, which is said, where there is no emulated device.
fn model(name: &str, ty: &str) -> Option<(tempfile::TempDir, PathBuf)> {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden(name, ty, dir.path());
    match Engine::plan_of(&path, &on(1, 0, "")) {
        Ok(_) => Some((dir, path)),
        Err(why) if why.to_string().contains("C++") => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

/// How many devices have experts.
fn used(engine: &Engine) -> usize {
    let devices = &engine.plan().device.as_ref().expect("on devices").plan.devices;
    devices.iter().filter(|device| device.expert_budget_bytes > 0).count()
}

fn agrees_with_the_cpu(name: &str, ty: &str) {
    let Some((_dir, path)) = model(name, ty) else { return };
    let cpu = EngineOptions { n_ctx: Some(32), ..golden_options() };
    let expected = answer(&load(&path, &cpu));
    for devices in [2, 3] {
        let engine = load(&path, &on(devices, devices as u64, ""));
        assert_eq!(used(&engine), devices, "{name}");
        assert!(answer(&engine) == expected, "{name} {ty} on {devices} devices");
        let counters = engine.expert_counters().unwrap();
        assert!(counters.hits_whole > 0, "{counters:?}");
        assert_eq!(counters.unheard_steps, 0, "{devices} devices");
    }
}

#[test]
fn several_devices_have_the_bits_of_the_cpu() {
    agrees_with_the_cpu("qwen3moe", "q8_0");
    // Never grouped, as its blocks are single numbers.
    agrees_with_the_cpu("qwen2moe", "f32");
}

#[test]
fn biases_latent_attention_and_delta_rules_make_no_difference() {
    agrees_with_the_cpu("gpt_oss", "q8_0");
    agrees_with_the_cpu("deepseek_v3", "q8_0");
    agrees_with_the_cpu("qwen3next", "q8_0");
    // Narrow experts.
    agrees_with_the_cpu("kimi-k3", "q8_0");
}

/// The least that a device can be given: a token's experts, and one more.
fn least(path: &Path) -> String {
    let part = Engine::plan_of(path, &on(1, 0, "")).unwrap().device.unwrap();
    part.plan.expert_min_bytes.to_string()
}

/// Whatever is given to experts, whoever computes them, and in whatever order the devices run.
/// `of_two`: a budget of which two devices get a share.
fn same_bits(name: &str, ty: &str, of_two: &str) {
    let Some((_dir, path)) = model(name, ty) else { return };
    let expected = answer(&load(&path, &on(1, 0, "100%")));
    let check = |what: &str, options: EngineOptions| {
        let engine = load(&path, &options);
        assert!(answer(&engine) == expected, "{name} {ty}: {what}");
        used(&engine)
    };
    for seed in 1..4 {
        assert_eq!(check("a seed", on(2, seed, of_two)), 2);
    }
    for share in [0.0, 0.4, 1.0] {
        let options = EngineOptions {
            test: TestHooks { cpu_share: Some(share), ..Default::default() },
            ..on(2, 5, of_two)
        };
        assert_eq!(check("a CPU share", options), 2);
    }
    for policy in POLICIES {
        let options = EngineOptions { policy: policy.parse().unwrap(), ..on(2, 6, of_two) };
        assert_eq!(check(policy, options), 2);
    }
    check("one device's least", on(3, 4, &least(&path)));
    let least = load(&path, &on(1, 0, "")).plan().sizes.minimum_bytes;
    let ram = RamBudget::Bytes(least);
    let share = Some(0.4);
    check(
        "three tiers",
        EngineOptions {
            ram,
            test: TestHooks { cpu_share: share, ..Default::default() },
            ..on(3, 7, "60%")
        },
    );
    let no_experts = EngineOptions { cpu_moe: CpuMoe::All, ..on(2, 2, "") };
    assert_eq!(check("experts on the CPU", no_experts), 0);
    check("micro-batches", EngineOptions { n_ubatch: Some(3), ..on(2, 3, "60%") });
    check("layers on the CPU", EngineOptions { gpu_layers: Some(2), ..on(2, 6, "") });
}

#[test]
fn bits_do_not_depend_on_budget_share_order_or_place() {
    same_bits("qwen3moe", "q8_0", "60%");
}

#[test]
fn with_biases_they_do_not_either() {
    // Two tokens' experts are more than there are: as much as devices have room for.
    same_bits("gpt_oss", "q8_0", "");
}

#[test]
fn a_rounded_cache_rounds_on_one_device_and_on_several_alike() {
    let Some((_dir, path)) = model("qwen3moe", "q8_0") else { return };
    let with = |options: EngineOptions| {
        let (cache_type_k, cache_type_v) = (CacheType::Q8_0, CacheType::Q8_0);
        answer(&load(&path, &EngineOptions { cache_type_k, cache_type_v, ..options }))
    };
    assert!(with(on(1, 0, "60%")) == with(on(2, 1, "60%")));
}

/// The first device has dense weights and no room for experts: others have them all.
#[test]
fn the_first_device_need_not_have_experts() {
    let Some((_dir, path)) = model("qwen3moe", "q8_0") else { return };
    let expected = answer(&load(&path, &on(1, 0, "100%")));
    let plan = Engine::plan_of(&path, &on(2, 0, "")).unwrap().device.unwrap().plan;
    let fixed = plan.planned_bytes(0) - plan.devices[0].expert_budget_bytes;
    // An eighth of it stays free.
    let memory_bytes = (fixed as usize + plan.expert_min_bytes as usize / 2) / 7 * 8;
    let config = Config { devices: 2, memory_bytes, seed: 3, ..Config::default() };
    let engine =
        load(&path, &EngineOptions { device: DeviceChoice::Emulated(config), ..on(2, 0, "") });
    let plan = &engine.plan().device.as_ref().unwrap().plan;
    let budgets: Vec<u64> = plan.devices.iter().map(|d| d.expert_budget_bytes).collect();
    assert!(budgets[0] == 0 && budgets[1] > 0, "{budgets:?}");
    assert!(answer(&engine) == expected);
}

/// Hits are hits wherever they are: once everything is there, nothing is missed.
#[test]
fn what_is_there_is_not_brought_again() {
    let Some((_dir, path)) = model("qwen3moe", "q8_0") else { return };
    let engine = load(
        &path,
        &EngineOptions {
            test: TestHooks { cpu_share: Some(0.0), ..Default::default() },
            ..on(2, 1, "")
        },
    );
    let counters = || engine.expert_counters().unwrap();
    answer(&engine);
    let before = counters();
    answer(&engine);
    let after = counters().since(&before);
    assert_eq!((after.misses, after.demand_bytes), (0, 0), "{after:?}");
    assert!(after.hits_whole > 0);
}
