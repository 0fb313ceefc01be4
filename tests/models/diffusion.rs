//! Models that fill in masked tokens, against the published loops over llama.cpp's logits
//! (`tests/golden/make_diffusion.py`).

use common::{convert_golden, golden_options, load, moeba, repo};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::diffusion::{DiffusionOptions, Schedule, diffuse};
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{DeviceChoice, Engine, EngineOptions};
use serde_json::Value;
use std::sync::Arc;

struct Case {
    prompt: Vec<u32>,
    options: DiffusionOptions,
    expected: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(repo().join("tests/golden/diffusion.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let case = |case: &Value| {
        let expected = ids(&case["expected"]);
        let number = |name: &str| case[name].as_f64();
        Case {
            prompt: ids(&all["prompt"]),
            options: DiffusionOptions {
                n_predict: expected.len(),
                steps: number("steps").unwrap() as usize,
                schedule: match (number("block_length"), number("eps")) {
                    (Some(length), None) => Schedule::Blocks(length as usize),
                    (None, Some(eps)) => Schedule::Time(eps as f32),
                    other => panic!("{other:?}"),
                },
                confidence: case["algorithm"].as_str().unwrap().parse().unwrap(),
                temperature: 0.0,
                top_k: 0,
                top_p: 1.0,
                guidance: number("cfg_scale").unwrap_or(0.0) as f32,
                seed: 0,
                mask: all["mask"].as_u64().unwrap() as u32,
                is_shifted: case["is_shifted"].as_bool().unwrap_or(false),
            },
            expected,
        }
    };
    all["cases"].as_array().unwrap().iter().map(case).collect()
}

fn filled(engine: &Arc<Engine>, prompt: &[u32], options: &DiffusionOptions) -> Vec<u32> {
    let mut session = engine.new_session().unwrap();
    diffuse(&mut session, prompt, options, &mut |_, _| Ok(())).unwrap()
}

#[test]
fn texts_are_those_of_the_published_loops() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("llada-moe", "f32", dir.path());
    let some = RamBudget::Percent(40.0);
    let device = DeviceChoice::Emulated(Config::default());
    let all = [
        EngineOptions { n_threads: Some(1), ..golden_options() },
        EngineOptions { n_threads: Some(2), ram: some, ..golden_options() },
        EngineOptions { device, n_ctx: Some(64), ..golden_options() },
    ];
    for options in all {
        let engine = load(&path, &options);
        for Case { prompt, options, expected } in cases() {
            assert_eq!(filled(&engine, &prompt, &options), expected, "{options:?}");
        }
    }
}

#[test]
fn what_is_drawn_is_the_seed_s() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("llada-moe", "f32", dir.path());
    let engine = load(&path, &golden_options());
    let Case { prompt, options, .. } = cases().remove(0);
    for name in ["origin", "random", "confidence"] {
        let confidence = name.parse().unwrap();
        let options =
            DiffusionOptions { temperature: 2.0, top_p: 0.9, confidence, ..options.clone() };
        let of = |seed| filled(&engine, &prompt, &DiffusionOptions { seed, ..options.clone() });
        let texts: Vec<_> = (0..3).map(of).collect();
        assert_eq!(texts, (0..3).map(of).collect::<Vec<_>>(), "{name}");
        assert!(texts[0] != texts[1] || texts[1] != texts[2], "{name}");
    }
}

#[test]
fn other_models_and_other_commands_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let told = |model: &str, command: &str| {
        let path = convert_golden(model, "f32", dir.path());
        let out = moeba().arg(command).arg(path).args(["-p", "<1>"]).output().unwrap();
        assert!(!out.status.success());
        String::from_utf8(out.stderr).unwrap()
    };
    assert!(told("llada-moe", "run").contains("use moeba diffuse"));
    assert!(told("qwen3moe", "diffuse").contains("use moeba run"));
    let no_mask = told("llada-moe", "diffuse");
    assert!(no_mask.contains("tokenizer.ggml.mask_token_id: expected a token"), "{no_mask}");
}
