//! Helpers of the integration tests: the program, models to run it on, files to read.

pub mod adapters;
pub mod cards;
pub mod cli;
pub mod edits;
pub mod gguf;
pub mod gguf_exercise;
mod golden;
pub mod hub;
pub mod jobs;
pub mod quant;
pub mod stream;
#[cfg(target_os = "linux")]
pub mod terminal;

pub use golden::{golden, gunzip};
use moeba::engine::{CacheType, Engine, EngineOptions};
use moeba::gguf::Writer;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

/// The repository's root.
pub fn repo() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

/// The path of the program under test. Cargo puts test binaries into `deps`, beside the program.
pub fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let dir = test.ancestors().nth(2).unwrap();
    dir.join(format!("moeba{}", std::env::consts::EXE_SUFFIX))
}

/// The program under test.
pub fn moeba() -> Command {
    Command::new(program())
}

/// Runs a command that must succeed.
pub fn succeed(command: &mut Command) -> Output {
    let output = command.output().expect("the program starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{stderr}", output.status);
    output
}

/// A golden checkpoint, or the model of a card, as a GGUF file in `dir`.
pub fn convert_golden(name: &str, outtype: &str, dir: &Path) -> PathBuf {
    if let Some(path) = cards::model(name, outtype, dir) {
        return path;
    }
    let out = dir.join(format!("{name}.{outtype}.gguf"));
    succeed(
        moeba().arg("convert").arg(golden(name)).arg("-o").arg(&out).args(["--outtype", outtype]),
    );
    out
}

/// Two threads and a cache that rounds nothing, as the golden logits were computed.
pub fn golden_options() -> EngineOptions {
    EngineOptions {
        n_threads: Some(2),
        cache_type_k: CacheType::F32,
        cache_type_v: CacheType::F32,
        ..EngineOptions::default()
    }
}

pub fn load(path: &Path, options: &EngineOptions) -> Arc<Engine> {
    Engine::load(path, options, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"))
}

/// A JSON list of token ids.
pub fn read_ids(path: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Metadata of a small qwen3moe model: these numbers of the architecture, and a vocabulary of 256.
pub fn set_small_header(out: &mut Writer, numbers: &[(&str, u32)]) {
    out.set("general.architecture", "qwen3moe").unwrap();
    for (key, n) in numbers {
        out.set(&format!("qwen3moe.{key}"), *n).unwrap();
    }
    out.set("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f32).unwrap();
    out.set("qwen3moe.rope.freq_base", 10000.0f32).unwrap();
    let bytes: Vec<String> = (0..256).map(|i| format!("<{i}>")).collect();
    out.set("tokenizer.ggml.model", "gpt2").unwrap();
    out.set("tokenizer.ggml.pre", "qwen2").unwrap();
    out.set("tokenizer.ggml.tokens", bytes).unwrap();
    out.set("tokenizer.ggml.token_type", vec![1i32; 256]).unwrap();
    out.set("tokenizer.ggml.merges", Vec::<String>::new()).unwrap();
    out.set("tokenizer.ggml.eos_token_id", 0u32).unwrap();
}

/// A C-ordered .npy array of 4-byte elements.
pub struct Npy {
    pub shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Npy {
    pub fn read(path: &Path) -> Npy {
        let all = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!(&all[..8], b"\x93NUMPY\x01\x00", "{}", path.display());
        let header_len = u16::from_le_bytes([all[8], all[9]]) as usize;
        let header = std::str::from_utf8(&all[10..10 + header_len]).expect("ASCII");
        assert!(header.contains("'fortran_order': False"), "{header}");
        assert!(header.contains("'<f4'") || header.contains("'<i4'"), "{header}");
        let shape = header.split('(').nth(1).and_then(|s| s.split(')').next()).expect("a shape");
        let shape: Vec<usize> = shape.split(',').filter_map(|n| n.trim().parse().ok()).collect();
        let bytes = all[10 + header_len..].to_vec();
        assert_eq!(bytes.len(), 4 * shape.iter().product::<usize>());
        Npy { shape, bytes }
    }

    pub fn f32s(&self) -> Vec<f32> {
        self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn i32s(&self) -> Vec<i32> {
        self.bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

pub fn argmax(values: &[f32]) -> usize {
    let best = |a: usize, b: usize| if values[b] > values[a] { b } else { a };
    (0..values.len()).reduce(best).expect("not empty")
}

/// The policies that have a name of their own.
pub const POLICIES: [&str; 8] = [
    "on-demand",
    "mixtral-offloading",
    "brainstorm",
    "deepspeed",
    "moe-infinity",
    "finemoe",
    "moepic",
    "prescope",
];
