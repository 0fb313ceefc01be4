//! A model small enough to be made in every test, and the program run on it.

use moeba::gguf::{TensorType, Writer};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

pub const N_EMBD: u64 = 32;
pub const N_LAYERS: u64 = 2;
pub const N_EXPERTS: u64 = 8;
pub const N_EXPERTS_USED: u64 = 2;
pub const N_FF: u64 = 32;
pub const N_CTX_TRAIN: u64 = 256;
/// 256 bytes and three special tokens.
pub const N_VOCAB: u64 = 259;

pub const CHAT_TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
     <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Optional parts of a tiny model.
#[derive(Clone, Copy, Default)]
pub struct Tiny {
    pub chat: bool,
    /// Weights that are no numbers.
    pub broken: bool,
}

/// A folder with the model in it.
pub struct Model {
    pub dir: TempDir,
    pub path: PathBuf,
}

impl Model {
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

pub fn tiny(options: Tiny) -> Model {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    write_tiny(&path, options);
    Model { dir, path }
}

/// A qwen3moe of two layers, random weights in f32, a vocabulary of bytes.
pub fn write_tiny(path: &Path, options: Tiny) {
    let mut out = Writer::create(path, None).unwrap();
    let arch = "qwen3moe";
    out.set("general.architecture", arch).unwrap();
    for (key, value) in [
        ("block_count", N_LAYERS),
        ("context_length", N_CTX_TRAIN),
        ("embedding_length", N_EMBD),
        ("feed_forward_length", N_FF),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 8),
        ("attention.value_length", 8),
        ("expert_count", N_EXPERTS),
        ("expert_used_count", N_EXPERTS_USED),
        ("expert_feed_forward_length", N_FF),
    ] {
        out.set(&format!("{arch}.{key}"), value as u32).unwrap();
    }
    out.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6f32).unwrap();
    out.set(&format!("{arch}.rope.freq_base"), 10000.0f32).unwrap();
    set_vocabulary(&mut out, options.chat);
    let shapes = shapes();
    for (name, dims) in &shapes {
        out.declare(name, dims, TensorType::F32).unwrap();
    }
    let mut random = 1u64;
    for (name, dims) in &shapes {
        let n = dims.iter().product::<u64>() as usize;
        let norm = name.contains("norm");
        let values: Vec<u8> = (0..n)
            .flat_map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let spread = (random >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
                let value = if norm { 1.0 } else { spread };
                let broken = options.broken && name == "output_norm.weight";
                if broken { f32::NAN } else { value }.to_le_bytes()
            })
            .collect();
        out.write_tensor(name, &values).unwrap();
    }
    out.finish().unwrap();
}

fn set_vocabulary(out: &mut Writer, chat: bool) {
    let mut tokens: Vec<String> = (0..=255u8).map(byte_name).collect();
    tokens.extend(["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from));
    let mut types = vec![1i32; 256];
    types.extend([3, 3, 3]);
    out.set("tokenizer.ggml.model", "gpt2").unwrap();
    out.set("tokenizer.ggml.pre", "qwen2").unwrap();
    out.set("tokenizer.ggml.tokens", tokens).unwrap();
    out.set("tokenizer.ggml.token_type", types).unwrap();
    out.set("tokenizer.ggml.merges", Vec::<String>::new()).unwrap();
    out.set("tokenizer.ggml.eos_token_id", if chat { 258u32 } else { 256 }).unwrap();
    out.set("tokenizer.ggml.add_bos_token", false).unwrap();
    if chat {
        out.set("tokenizer.chat_template", CHAT_TEMPLATE).unwrap();
    }
}

/// GPT-2's printable stand-in for a byte.
fn byte_name(byte: u8) -> String {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let c = match printable(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
            char::from_u32(256 + before).unwrap()
        }
    };
    c.to_string()
}

/// Innermost dimension first, as GGUF counts.
fn shapes() -> Vec<(String, Vec<u64>)> {
    let mut out = vec![
        ("token_embd.weight".into(), vec![N_EMBD, N_VOCAB]),
        ("output_norm.weight".into(), vec![N_EMBD]),
        ("output.weight".into(), vec![N_EMBD, N_VOCAB]),
    ];
    for layer in 0..N_LAYERS {
        let mut add = |name: &str, dims: &[u64]| {
            out.push((format!("blk.{layer}.{name}.weight"), dims.to_vec()));
        };
        add("attn_norm", &[N_EMBD]);
        add("attn_q", &[N_EMBD, 32]);
        add("attn_k", &[N_EMBD, 16]);
        add("attn_v", &[N_EMBD, 16]);
        add("attn_q_norm", &[8]);
        add("attn_k_norm", &[8]);
        add("attn_output", &[32, N_EMBD]);
        add("ffn_norm", &[N_EMBD]);
        add("ffn_gate_inp", &[N_EMBD, N_EXPERTS]);
        add("ffn_gate_exps", &[N_EMBD, N_FF, N_EXPERTS]);
        add("ffn_up_exps", &[N_EMBD, N_FF, N_EXPERTS]);
        add("ffn_down_exps", &[N_FF, N_EMBD, N_EXPERTS]);
    }
    out
}

/// Beginnings of the names of variables that the program reads.
const VARIABLES: [&str; 4] = ["MOEBA_", "LLAMA_ARG_", "HF_", "RUST_LOG"];

/// The program without the machine's own settings, which must not decide a test.
pub fn moeba() -> Command {
    let mut command = Command::new(crate::program());
    for (name, _) in std::env::vars_os() {
        let text = name.to_str().unwrap_or_default();
        if VARIABLES.iter().any(|v| text.starts_with(v)) || text.ends_with("_proxy") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// A subcommand on a model.
pub fn on(model: &Model, subcommand: &str, args: &[&str]) -> Output {
    moeba().arg(subcommand).arg(&model.path).args(args).output().unwrap()
}

pub fn stdout(out: &Output) -> &str {
    std::str::from_utf8(&out.stdout).unwrap()
}

pub fn stderr(out: &Output) -> &str {
    std::str::from_utf8(&out.stderr).unwrap()
}

/// Success, and what was printed.
#[track_caller]
pub fn succeeded(out: &Output) -> &str {
    assert!(out.status.success(), "{:?}\n{}", out.status, stderr(out));
    stdout(out)
}

/// An exit with this code, one sentence that says all these words, and no more.
#[track_caller]
pub fn failed(out: &Output, code: i32, words: &[&str]) {
    let message = stderr(out);
    assert_eq!(out.status.code(), Some(code), "{message}");
    let errors: Vec<&str> = message.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{message}");
    assert!(!message.contains("panicked"), "{message}");
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
}
