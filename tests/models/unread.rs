//! Keys that nothing reads are named, and those that moeba cannot compute with are refused.

use common::cli::{failed, stderr, succeeded};
use common::edits::File;
use common::{cards, convert_golden, moeba};
use moeba::gguf::Gguf;
use moeba::model::Bound;
use std::path::{Path, PathBuf};
use std::process::Output;

fn unread(path: &Path) -> Vec<String> {
    let bound = Bound::new(Gguf::open(path).unwrap()).unwrap();
    bound.unread_keys().into_iter().map(str::to_owned).collect()
}

/// Every checkpoint and every card.
fn models() -> Vec<String> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    let folders = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    let names = folders.map(|entry| entry.file_name().into_string().unwrap());
    let names = names.filter(|name| !["cards", "adapters"].contains(&name.as_str()));
    names.chain(cards::names()).collect()
}

#[test]
fn nothing_of_a_sound_file_is_unread() {
    let dir = tempfile::tempdir().unwrap();
    let (mut wrong, models) = (Vec::new(), models());
    assert!(models.len() > 100, "{}", models.len());
    for name in models {
        let path = convert_golden(&name, "f32", dir.path());
        let unread = unread(&path);
        if !unread.is_empty() {
            wrong.push((name, unread));
        }
        std::fs::remove_file(path).unwrap();
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn check(path: &Path) -> Output {
    moeba().args(["inspect", "--check"]).arg(path).output().unwrap()
}

#[test]
fn a_key_that_may_change_answers_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = File::read(&convert_golden("qwen3moe", "f32", dir.path()));
    let path = dir.path().join("more.gguf");
    for (key, value) in [("attn_logit_softcapping", 0.0f32), ("swin_norm", 0.0)] {
        file.set(&format!("qwen3moe.{key}"), value);
    }
    file.set("qwen3moe.vocab_size", 200u32);
    file.set("qwen3moe.attention.causal", true);
    file.set("other.attention.scale", 2.0f32);
    file.write(&path);
    assert_eq!(unread(&path), [""; 0]);
    assert_eq!(stderr(&check(&path)), "", "neither zeros nor keys of another architecture");
    file.set("qwen3moe.attn_logit_softcapping", 30.0f32);
    file.set("qwen3moe.attention.new_factors", vec![0.0f32, 2.0]);
    file.set("qwen3moe.attention.causal", false);
    file.write(&path);
    let out = check(&path);
    succeeded(&out);
    let lines: Vec<_> = stderr(&out).lines().filter(|line| line.contains("not used")).collect();
    let [line] = lines[..] else { panic!("{lines:?}") };
    let keys = "qwen3moe.attn_logit_softcapping, qwen3moe.attention.new_factors, \
                qwen3moe.attention.causal; programs";
    assert!(line.contains("more.gguf") && line.contains(keys), "{line}");
}

#[test]
fn rotated_weights_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["qwen3moe", "llama", "qwen3next"] {
        let mut file = File::read(&convert_golden(name, "f32", dir.path()));
        file.set("prism.hadamard.version", 1u32);
        file.set("prism.hadamard.block_size", 32u32);
        let path = dir.path().join("rotated.gguf");
        file.write(&path);
        let words = ["rotated.gguf", "prism.hadamard.version", "Hadamard"];
        failed(&check(&path), 1, &words);
        let args = ["logits", "--tokens", "1,2", "-o"];
        let logits = moeba().args(args).arg(dir.path().join("l.npy")).arg(&path).output().unwrap();
        failed(&logits, 1, &words);
    }
}
