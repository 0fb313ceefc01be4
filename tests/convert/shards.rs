//! Models in several files: cut, put together, quantised file by file; types of single tensors.

use assert_cmd::Command;
use common::golden;
use moeba::gguf::{Gguf, TensorType};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Runs with these arguments; answers the exit code and what stderr has.
fn moeba(args: &[&str]) -> (i32, String) {
    let output = Command::cargo_bin("moeba").unwrap().args(args).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn ran(args: &[&str]) -> String {
    let (code, said) = moeba(args);
    assert_eq!(code, 0, "{args:?}: {said}");
    said
}

/// The golden Qwen 3 MoE in f32, in a folder.
struct Made(TempDir);

impl Made {
    fn new() -> Made {
        let made = Made(tempfile::tempdir().unwrap());
        let checkpoint = golden("qwen3moe").to_string_lossy().into_owned();
        ran(&["convert", &checkpoint, "-o", &made.name("a.gguf"), "--outtype", "f32"]);
        made
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    fn types(&self, args: &[&str]) -> Vec<(String, TensorType)> {
        let (input, output) = (self.name("a.gguf"), self.name("typed.gguf"));
        ran(&[&["quantize", &input, &output][..], args].concat());
        let gguf = Gguf::open(&output).unwrap();
        gguf.tensors().iter().map(|t| (t.name.clone(), t.ty)).collect()
    }
}

fn same_tensors(a: &Path, b: &Path) {
    let (a, b) = (Gguf::open(a).unwrap(), Gguf::open(b).unwrap());
    assert_eq!(a.tensors().len(), b.tensors().len());
    for (x, y) in a.tensors().iter().zip(b.tensors()) {
        assert_eq!((&x.name, &x.dims, x.ty), (&y.name, &y.dims, y.ty));
        assert!(a.bytes(x) == b.bytes(y), "{}", x.name);
    }
}

#[test]
fn a_model_is_cut_and_put_together() {
    let made = Made::new();
    let (input, prefix) = (made.name("a.gguf"), made.name("cut"));
    ran(&["split", "--split-max-tensors", "15", &input, &prefix]);
    let first = made.path("cut-00001-of-00003.gguf");
    same_tensors(&made.path("a.gguf"), &first);
    let gguf = Gguf::open(&first).unwrap();
    assert_eq!(gguf.shards().len(), 3);
    let keys: Vec<&str> = gguf.keys().map(|(key, _)| key).collect();
    assert!(keys.ends_with(&["split.no", "split.tensors.count", "split.count"]), "{keys:?}");
    let types = keys[keys.len() - 3..].iter().map(|key| gguf.get(key).unwrap().to_string());
    assert_eq!(types.collect::<Vec<_>>(), ["0", "39", "3"]);
    // What is there stays: files of a cut, and the files that are read.
    let (code, said) = moeba(&["split", "--split-max-tensors", "20", &input, &prefix]);
    assert!(code == 1 && said.contains("cut-0000") && said.contains("not replaced"), "{said}");
    let shard = made.name("cut-00001-of-00003.gguf");
    let (code, said) = moeba(&["split", &shard, &prefix, "--force"]);
    assert!(code == 2 && said.contains("would replace"), "{code}: {said}");

    let merged = made.name("merged.gguf");
    ran(&["merge", &shard, &merged]);
    same_tensors(&made.path("a.gguf"), merged.as_ref());
    let (code, said) = moeba(&["split", "--merge", &shard, &merged]);
    assert!(code == 1 && said.contains("not replaced"), "{code}: {said}");
    let (code, said) = moeba(&["merge", &input, &made.name("none.gguf")]);
    assert!(code == 1 && said.contains("split.count"), "{code}: {said}");
    // The size of one file is what is asked for, and a first one may have metadata alone.
    let dry = ["split", "--split-max-size", "1M", "--dry-run", "--no-tensor-first-split"];
    ran(&[&dry[..], &[&input, &made.name("dry")]].concat());
    assert!(
        std::fs::read_dir(made.0.path())
            .unwrap()
            .all(|entry| { !entry.unwrap().file_name().to_string_lossy().starts_with("dry") })
    );
    ran(&["split", "--no-tensor-first-split", &input, &made.name("empty.gguf")]);
    let first = made.path("empty-00001-of-00002.gguf");
    same_tensors(&made.path("a.gguf"), &first);
    assert!(std::fs::metadata(first).unwrap().len() < 1 << 16);
    for bad in ["0M", "1", "5K"] {
        assert_eq!(moeba(&["split", "--split-max-size", bad, &input, &prefix]).0, 2, "{bad}");
    }
}

#[test]
fn a_split_model_is_quantised_file_by_file() {
    let made = Made::new();
    ran(&["split", "--split-max-tensors", "15", &made.name("a.gguf"), &made.name("cut")]);
    let first = made.name("cut-00001-of-00003.gguf");
    ran(&["quantize", "--keep-split", &first, &made.name("q.gguf"), "q8_0", "2"]);
    ran(&["quantize", &made.name("a.gguf"), &made.name("whole.gguf"), "q8_0"]);
    same_tensors(&made.path("whole.gguf"), &made.path("q-00001-of-00003.gguf"));
    assert!(!made.path("q.gguf").exists());
}

#[test]
fn types_of_single_tensors_come_before_the_mix() {
    let made = Made::new();
    let of = |types: &[(String, TensorType)], name: &str| {
        types.iter().find(|(of, _)| of == name).unwrap_or_else(|| panic!("{name}")).1
    };
    let args = ["--tensor-type", "ATTN_Q=f16", "--tensor-type", r"blk\.1\.attn=q4_1", "q8_0"];
    let types = made.types(&args);
    assert_eq!(of(&types, "blk.1.attn_q.weight"), TensorType::F16);
    assert_eq!(of(&types, "blk.1.attn_k.weight"), TensorType::Q4_1);
    assert_eq!(of(&types, "blk.0.attn_k.weight"), TensorType::Q8_0);
    let args = ["--output-tensor-type", "q5_0", "--token-embedding-type", "Q4_0", "q8_0"];
    let types = made.types(&args);
    assert_eq!(of(&types, "token_embd.weight"), TensorType::Q4_0);
    assert_eq!(of(&types, "output.weight"), TensorType::Q5_0);
    let types = made.types(&["--leave-output-tensor", "q4_0"]);
    assert_eq!(of(&types, "output.weight"), TensorType::F32);
    let types = made.types(&["--pure", "q4_0"]);
    assert_eq!(of(&types, "output.weight"), TensorType::Q4_0);
    for bad in ["attn_q", "=q4_0", "a=q9", "(=q8_0", "a=i32"] {
        let args = ["quantize", "--tensor-type", bad, "in.gguf", "out.gguf", "q8_0"];
        let (code, said) = moeba(&args);
        assert!(code == 2, "{bad}: {said}");
    }
}
