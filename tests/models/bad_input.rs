//! Files that are sound GGUF but no model that can run, and requests that a model cannot serve:
//! each ends in one sentence with the file, the field, what was expected and what was found, and
//! in exit code 1.

use std::path::{Path, PathBuf};
use std::process::Command;

use common::edits::{File, Tensor};
use common::{convert_golden, moeba};
use moeba::gguf::{OwnedValue, TensorType};

/// A change to a sound file.
enum Edit {
    Set(&'static str, OwnedValue),
    Drop(&'static str),
    DropTensor(&'static str),
    /// Declares other dimensions for the same bytes.
    Reshape(&'static str, &'static [u64]),
    /// Leaves out the end of the outermost dimension.
    Cut(&'static str),
    /// Declares an integer type of the same size for the same bytes.
    Retype(&'static str),
}

fn edited(source: &Path, name: &str, edit: &Edit) -> PathBuf {
    let mut file = File::read(source);
    match edit {
        Edit::Set(key, value) => file.set(key, value.clone()),
        Edit::Drop(key) => file.drop_key(key),
        Edit::DropTensor(name) => drop(file.take(name)),
        Edit::Reshape(name, dims) => {
            let tensor = Tensor { dims: dims.to_vec(), ..file.take(name) };
            file.tensors.push(tensor);
        }
        Edit::Cut(name) => {
            let tensor = file.take(name).cut().unwrap();
            file.tensors.push(tensor);
        }
        Edit::Retype(name) => {
            let tensor = Tensor { ty: TensorType::I32, ..file.take(name) };
            file.tensors.push(tensor);
        }
    }
    let path = source.with_file_name(format!("{name}.gguf"));
    file.write(&path);
    path
}

/// Exit code 1 and one line on stderr that holds all of `parts`.
fn refuses(command: &mut Command, parts: &[&str]) {
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{command:?}: {stderr}");
    let errors: Vec<&str> = stderr.lines().filter(|l| l.contains("error: ")).collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    for part in parts {
        assert!(errors[0].contains(part), "{part:?} is not in {:?}", errors[0]);
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

fn logits(model: &Path, tokens: &str) -> Command {
    let mut command = moeba();
    command.arg("logits").arg(model).args(["--tokens", tokens, "-o"]);
    command.arg(model.with_extension("npy"));
    command
}

#[test]
fn models_that_cannot_run_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let sound = convert_golden("qwen3moe", "f32", dir.path());
    assert!(logits(&sound, "1,2").output().unwrap().status.success());
    let set = |key, value: u32| Edit::Set(key, value.into());
    let cases: Vec<(Edit, &[&str])> = vec![
        (set("qwen3moe.block_count", 0), &["qwen3moe.block_count", "expected 1 to", "got 0"]),
        (set("qwen3moe.block_count", 4), &["blk.3.", "expected a tensor"]),
        (set("qwen3moe.embedding_length", 65), &["token_embd.weight", "expected shape [65"]),
        (set("qwen3moe.embedding_length", u32::MAX), &["embedding_length", "got 4294967295"]),
        (set("qwen3moe.attention.head_count", 3), &["head_count_kv", "a divisor of", "got 2"]),
        (set("qwen3moe.attention.key_length", 31), &["rope.dimension_count", "even"]),
        (set("qwen3moe.expert_count", 2), &["expert_used_count", "at most", "got 3"]),
        (set("qwen3moe.expert_count", 7), &["ffn_gate_inp", "expected 7 rows", "got 8"]),
        (Edit::Set("qwen3moe.rope.freq_base", f32::NAN.into()), &["freq_base", "got NaN"]),
        (Edit::Set("qwen3moe.block_count", "three".into()), &["block_count", "string"]),
        (
            Edit::Set("general.architecture", "mamba9".into()),
            &["inspect --architectures", "mamba9"],
        ),
        (Edit::Drop("general.architecture"), &["general.architecture", "got nothing"]),
        (Edit::Drop("qwen3moe.context_length"), &["context_length", "got nothing"]),
        (
            Edit::Drop("qwen3moe.attention.layer_norm_rms_epsilon"),
            &["layer_norm_rms_epsilon", "got nothing"],
        ),
        (Edit::Drop("tokenizer.ggml.tokens"), &["tokenizer.ggml.tokens"]),
        (Edit::DropTensor("output_norm.weight"), &["output_norm.weight", "expected a tensor"]),
        (Edit::DropTensor("blk.1.attn_q_norm.weight"), &["blk.1.attn_q_norm.weight"]),
        (Edit::DropTensor("blk.2.ffn_down_exps.weight"), &["blk.2.ffn_down_exps.weight"]),
        (Edit::Reshape("output_norm.weight", &[8, 8]), &["output_norm.weight", "shape [64]"]),
        (Edit::Retype("blk.0.attn_q.weight"), &["blk.0.attn_q.weight", "types F32", "got I32"]),
    ];
    refuses_all(&sound, &cases);
}

/// Each edit of a sound file is refused with these words and the file's name.
fn refuses_all(sound: &Path, cases: &[(Edit, &[&str])]) {
    for (i, (edit, parts)) in cases.iter().enumerate() {
        let broken = edited(sound, &format!("broken{i}"), edit);
        let file = broken.file_name().unwrap().to_str().unwrap().to_owned();
        let parts: Vec<&str> = parts.iter().copied().chain([file.as_str()]).collect();
        refuses(&mut logits(&broken, "1,2"), &parts);
    }
}

fn refuses_golden(name: &str, cases: &[(Edit, &[&str])]) {
    let dir = tempfile::tempdir().unwrap();
    refuses_all(&convert_golden(name, "f32", dir.path()), cases);
}

#[test]
fn experts_that_do_not_fit_each_other_are_named() {
    let set = |value: u32| Edit::Set("llama.expert_count", value.into());
    refuses_golden(
        "mixtral",
        &[
            (Edit::Cut("blk.0.ffn_gate_exps.weight"), &["ffn_gate_exps", "8]", "got [64, "]),
            (Edit::Cut("blk.1.ffn_up_exps.weight"), &["blk.1.ffn_", "_exps", "expected shape"]),
            (Edit::Cut("blk.2.ffn_down_exps.weight"), &["ffn_down_exps", "64, 8]", "64, 7]"]),
            (Edit::Cut("blk.1.ffn_gate_inp.weight"), &["blk.1.ffn_gate_inp", "8 rows", "got 7"]),
            (Edit::DropTensor("blk.1.ffn_gate_inp.weight"), &["blk.1.ffn_gate_inp", "a tensor"]),
            (Edit::Drop("llama.expert_count"), &["expert_count", "ffn_up_exps", "got none"]),
            (set(0), &["expert_count", "number of experts in blk.0.ffn_up_exps", "got none"]),
            (set(9), &["blk.0.ffn_gate_inp.weight", "expected 9 rows", "got 8"]),
            (Edit::Drop("llama.expert_used_count"), &["expert_used_count", "got nothing"]),
        ],
    );
}

#[test]
fn gates_that_do_not_exist_are_named() {
    let set = |key, value: u32| Edit::Set(key, value.into());
    refuses_golden(
        "deepseek_v3",
        &[
            (
                set("deepseek2.expert_gating_func", 0),
                &["_gating_func", "exp_probs_b.bias", "got 0"],
            ),
            (set("deepseek2.expert_gating_func", 7), &["expert_gating_func", "got 7"]),
            (Edit::Drop("deepseek2.expert_gating_func"), &["_gating_func", "exp_probs_b.bias"]),
            (Edit::Drop("deepseek2.expert_weights_norm"), &["_weights_norm", "exp_probs_b.bias"]),
            (Edit::DropTensor("blk.1.exp_probs_b.bias"), &["blk.1.exp_probs_b.bias", "a tensor"]),
            (set("deepseek2.expert_group_count", 3), &["expert_group_count", "a divisor", "got 3"]),
            (set("deepseek2.expert_group_count", 8), &["no more than half", "got 8"]),
            (set("deepseek2.expert_group_used_count", 3), &["at most 2 groups", "got 3"]),
            (
                Edit::Set("deepseek2.expert_weights_scale", f32::NAN.into()),
                &["expert_weights_scale", "got NaN"],
            ),
            (Edit::Drop("deepseek2.expert_weights_scale"), &["_weights_scale", "got nothing"]),
        ],
    );
    let three = Edit::Set("phimoe.expert_used_count", 3u32.into());
    refuses_golden("phimoe", &[(three, &["expert_used_count", "expected 2", "got 3"])]);
}

#[test]
fn positions_that_cannot_be_turned_are_named() {
    let ty = "gpt-oss.rope.scaling.type";
    let factor = |value: f32| Edit::Set("gpt-oss.rope.scaling.factor", value.into());
    refuses_golden(
        "gpt_oss",
        &[
            (Edit::Set(ty, "ntk".into()), &[ty, "\"linear\", \"yarn\"", "got \"ntk\""]),
            (Edit::Set(ty, "longrope".into()), &[ty, "got \"longrope\""]),
            (Edit::Drop(ty), &[ty, "beside gpt-oss.rope.scaling.factor", "got nothing"]),
            (factor(0.0), &["rope.scaling.factor", "a positive number", "got 0"]),
            (factor(f32::INFINITY), &["rope.scaling.factor", "got inf"]),
            (
                Edit::Drop("gpt-oss.rope.scaling.original_context_length"),
                &["original_context_length", "got nothing"],
            ),
            (
                Edit::Set("gpt-oss.attention.sliding_window", 0u32.into()),
                &["sliding_window", "expected 1 to", "got 0"],
            ),
            (Edit::Drop("gpt-oss.attention.sliding_window"), &["window", "got nothing"]),
            (
                Edit::Set("gpt-oss.attention.head_count_kv", 3u32.into()),
                &["head_count_kv", "a divisor of attention.head_count = 4", "got 3"],
            ),
            (Edit::DropTensor("blk.1.attn_sinks.weight"), &["blk.1.attn_sinks.weight"]),
        ],
    );
    let long = "rope_factors_long.weight";
    let original = "phimoe.rope.scaling.original_context_length";
    refuses_golden(
        "phimoe",
        &[
            (Edit::DropTensor(long), &[long, "a tensor", "nothing of that name"]),
            (Edit::Cut(long), &[long, "expected shape [8]", "got [7]"]),
            (Edit::Drop(original), &[original, "got nothing"]),
        ],
    );
}

#[test]
fn states_that_do_not_fit_are_named() {
    let listed = "qwen35moe.attention.recurrent_layers";
    let set = |key, value: u32| Edit::Set(key, value.into());
    refuses_golden(
        "qwen35moe",
        &[
            // Four layers and the one that predicts a further token.
            (Edit::Set(listed, vec![true; 3].into()), &[listed, "for 5 layers", "got 3 of them"]),
            (Edit::Set(listed, vec![true; 6].into()), &[listed, "for 5 layers", "got 6 of them"]),
            (Edit::Set(listed, vec![1.0f32; 5].into()), &[listed, "true or false", "got array"]),
            (Edit::Set(listed, vec![true; 5].into()), &["blk.3.", "expected a tensor"]),
            (Edit::Set(listed, vec![false; 5].into()), &["blk.0.attn_q", "a tensor"]),
            (set("qwen35moe.ssm.time_step_rank", 3), &["time_step_rank", "a multiple of ssm"]),
            (set("qwen35moe.ssm.inner_size", 63), &["ssm.inner_size", "a multiple of", "got 63"]),
            (set("qwen35moe.ssm.conv_kernel", 0), &["conv_kernel", "got 0"]),
            (set("qwen35moe.ssm.conv_kernel", 5), &["blk.0.ssm_conv1d.weight", "shape [5, "]),
            (Edit::Drop("qwen35moe.ssm.state_size"), &["ssm.state_size", "got nothing"]),
        ],
    );
}

#[test]
fn requests_that_do_not_fit_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = convert_golden("mixtral", "q8_0", dir.path());
    refuses(&mut logits(&model, "1,384"), &["token id 384 is out of range", "384 tokens"]);
    refuses(&mut logits(&model, "1,4294967295"), &["token id 4294967295 is out of range"]);
    let mut run = moeba();
    run.arg("run").arg(&model).args(["-p", "a a a a a a a a a a a a", "-c", "4", "-n", "1"]);
    refuses(&mut run, &["4"]);
}
