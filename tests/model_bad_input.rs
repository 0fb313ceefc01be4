//! Files that are sound GGUF but no model that can run, and requests that a model cannot serve:
//! each ends in one sentence with the file, the field, what was expected and what was found, and
//! in exit code 1.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{convert_golden, moeba};
use moeba::gguf::{Gguf, OwnedValue, TensorType, Writer};

/// What to change of a sound file.
#[derive(Clone)]
enum Edit {
    Set(&'static str, OwnedValue),
    Drop(&'static str),
    DropTensor(&'static str),
    /// Declares other dimensions for the same bytes.
    Reshape(&'static str, &'static [u64]),
    /// Declares an integer type of the same size for the same bytes.
    Retype(&'static str),
}

fn edited(source: &Path, name: &str, edit: &Edit) -> PathBuf {
    let gguf = Gguf::open(source).unwrap();
    let path = source.with_file_name(format!("{name}.gguf"));
    let mut out = Writer::create(&path, None).unwrap();
    for (key, value) in gguf.keys() {
        match edit {
            Edit::Set(k, new) if *k == key => out.set(key, new.clone()).unwrap(),
            Edit::Drop(k) if *k == key => (),
            _ => out.set(key, OwnedValue::from(value)).unwrap(),
        }
    }
    let kept = |t: &&moeba::gguf::TensorInfo| !matches!(edit, Edit::DropTensor(n) if *n == t.name);
    for t in gguf.tensors().iter().filter(kept) {
        match edit {
            Edit::Reshape(n, dims) if *n == t.name => out.declare(&t.name, dims, t.ty).unwrap(),
            Edit::Retype(n) if *n == t.name => {
                out.declare(&t.name, &t.dims, TensorType::I32).unwrap()
            }
            _ => out.declare(&t.name, &t.dims, t.ty).unwrap(),
        };
    }
    for t in gguf.tensors().iter().filter(kept) {
        out.write_tensor(&t.name, gguf.bytes(t)).unwrap();
    }
    out.finish().unwrap();
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
        (set("qwen3moe.expert_count", 7), &["ffn_gate_inp", "expected shape [64, 7]"]),
        (Edit::Set("qwen3moe.rope.freq_base", f32::NAN.into()), &["freq_base", "got NaN"]),
        (Edit::Set("qwen3moe.block_count", "three".into()), &["block_count", "string"]),
        (Edit::Set("general.architecture", "mamba9".into()), &["qwen2moe, ", "mamba9"]),
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
    for (i, (edit, parts)) in cases.iter().enumerate() {
        let broken = edited(&sound, &format!("broken{i}"), edit);
        let file = broken.file_name().unwrap().to_str().unwrap().to_owned();
        let parts: Vec<&str> = parts.iter().copied().chain([file.as_str()]).collect();
        refuses(&mut logits(&broken, "1,2"), &parts);
    }
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
