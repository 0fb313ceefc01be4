//! Factors beside matrices, as NVFP4 and F8_E4M3 files have them. A matrix of other powers of two
//! with the factors that undo them computes the very same bits, wherever experts come from; and
//! biases are what they were.

use common::edits::{File, Tensor};
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::plan::ram::RamBudget;
use moeba::engine::{DeviceChoice, EngineOptions, Want};
use moeba::gguf::TensorType;
use moeba::model::descriptor::Descriptor;
use std::path::Path;

/// A model of each kind of layer that has factors.
const MODELS: [&str; 11] = [
    "qwen3moe",
    "llama3_rope",
    "mixtral",
    "hy_v3",
    "deepseek32",
    "qwen35moe",
    "nemotron_h_moe",
    "bailingmoe2",
    "gpt_oss",
    "qwen3next",
    "minimax-m3",
];

/// Factors of so many matrices: powers of two, of either sign.
fn factors(n: usize) -> Vec<f32> {
    (0..n).map(|i| [0.5, -2.0, 8.0, -0.25][i % 4]).collect()
}

/// The architecture's names of factors in a layer, without ending.
fn scaled(file: &File) -> Vec<String> {
    let name = file.keys.iter().find(|(key, _)| key == "general.architecture").unwrap();
    let moeba::gguf::OwnedValue::String(name) = &name.1 else { panic!("a text") };
    let name = String::from_utf8(name.clone()).unwrap();
    let descriptor = Descriptor::for_architecture(&name, Path::new("")).unwrap();
    let names = descriptor.tensors.iter().filter(|(role, _)| role.ends_with("_scale"));
    let names = names.map(|(_, name)| name.trim_end_matches('?').to_owned());
    names.filter_map(|name| Some(name.strip_suffix(".scale")?.to_owned())).collect()
}

/// Gives every matrix that may have factors some, and undoes them in its weights if they are f32.
/// Answers how many.
fn scale_all(file: &mut File) -> usize {
    let (patterns, mut added) = (scaled(file), Vec::new());
    for tensor in &mut file.tensors {
        let of_layer = |pattern: &String| {
            let (before, after) = pattern.split_once("{layer}")?;
            let rest = tensor.name.strip_prefix(before)?.strip_suffix(".weight")?;
            Some(rest.strip_suffix(after)?.parse::<usize>().is_ok())
        };
        if !patterns.iter().any(|pattern| of_layer(pattern) == Some(true)) {
            continue;
        }
        let n = tensor.dims.get(2).copied().unwrap_or(1) as usize;
        let factors = factors(n);
        if tensor.ty == TensorType::F32 {
            let mut values = tensor.f32s();
            let size = values.len() / n;
            for (matrix, factor) in values.chunks_exact_mut(size).zip(&factors) {
                matrix.iter_mut().for_each(|w| *w /= factor);
            }
            *tensor = Tensor::of(&tensor.name, &tensor.dims, &values);
        }
        let name = tensor.name.replace(".weight", ".scale");
        added.push(Tensor::of(&name, &[n as u64], &factors));
    }
    let n = added.len();
    file.tensors.extend(added);
    n
}

fn bits(path: &Path, options: &EngineOptions) -> Vec<u32> {
    let mut session = load(path, options).new_session().unwrap();
    let tokens: Vec<u32> = (0..14).map(|i| 3 + i * 37 % 90).collect();
    let mut bits = Vec::new();
    let (prompt, decoded) = tokens.split_at(11);
    session.eval_all(prompt, &mut |_, l| bits.extend(l.iter().map(|l| l.to_bits()))).unwrap();
    for token in decoded {
        let logits = session.eval(&[*token], Want::Last).unwrap();
        bits.extend(logits.all().iter().map(|l| l.to_bits()));
    }
    bits
}

/// With matrices of 8 bits prompts are grouped by expert. Factors stay: the device has the CPU's
/// bits anyway.
#[test]
fn devices_multiply_by_factors_too() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        let mut file = File::read(&convert_golden(name, "q8_0", dir.path()));
        scale_all(&mut file);
        let path = dir.path().join("scaled.gguf");
        file.write(&path);
        let base = || EngineOptions { n_ctx: Some(32), ..golden_options() };
        let expected = bits(&path, &base());
        for vram in ["100%", "60%"] {
            let device = DeviceChoice::Emulated(Config::default());
            let vram = vram.parse().unwrap();
            assert!(bits(&path, &EngineOptions { device, vram, ..base() }) == expected, "{name}");
        }
    }
}

#[test]
fn factors_undo_those_of_the_weights() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        let plain = convert_golden(name, "f32", dir.path());
        let expected = bits(&plain, &golden_options());
        let mut file = File::read(&plain);
        let n = scale_all(&mut file);
        let path = dir.path().join("scaled.gguf");
        file.write(&path);
        assert!(n > 3, "{name}: {n} factors");
        for (n_threads, ram) in [(1, RamBudget::Auto), (2, RamBudget::Percent(50.0))] {
            let options = EngineOptions { n_threads: Some(n_threads), ram, ..golden_options() };
            assert!(bits(&path, &options) == expected, "{name}: {n_threads} threads, {ram:?}");
        }
    }
}

#[test]
fn a_factor_of_nothing_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let plain = convert_golden("qwen3moe", "f32", dir.path());
    for (name, value) in
        [("attn_q", 0.0), ("ffn_up_exps", f32::NAN), ("attn_output", f32::NEG_INFINITY)]
    {
        let mut file = File::read(&plain);
        let n =
            if name == "ffn_up_exps" { file.tensor("blk.1.ffn_up_exps.weight").dims[2] } else { 1 };
        let mut values = factors(n as usize);
        values[n as usize / 2] = value;
        file.tensors.push(Tensor::of(&format!("blk.1.{name}.scale"), &[n], &values));
        let path = dir.path().join("wrong.gguf");
        file.write(&path);
        let loaded = moeba::engine::Engine::load(&path, &golden_options(), &mut |_| ());
        let Err(refused) = loaded else { panic!("{name}") };
        let refused = refused.to_string();
        let expected = format!("blk.1.{name}.scale: expected finite numbers other than 0, got ");
        assert!(refused.contains(&expected), "{refused}");
    }
}
