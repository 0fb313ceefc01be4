//! Behaviour that only a separate process shows: a full disk, Ctrl-C, and memory that does not grow
//! with the model. The child is this test program again, running `child` alone.
#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use moeba::convert::{ConvertOptions, Layout, Mix, Routing, SynthOptions, convert, synth};
use moeba::interrupt;
use serde_json::{Value, json};

const TASK: &str = "CONVERT_TEST_TASK";
const FOLDER: &str = "CONVERT_TEST_FOLDER";

/// Not a test: what the others start. Says how it ended and how much memory it took.
#[test]
#[ignore = "the child of the other tests"]
fn child() {
    let (Ok(task), Ok(folder)) = (std::env::var(TASK), std::env::var(FOLDER)) else { return };
    interrupt::install().unwrap();
    let output = Path::new(&folder).join("out.gguf");
    let result = match task.as_str() {
        "convert" => convert(&ConvertOptions {
            folder: Path::new(&folder).join("checkpoint"),
            output,
            mix: Some(Mix::Q8_0),
            ..ConvertOptions::default()
        }),
        _ => synth(&SynthOptions {
            // Long enough to be interrupted, and little enough for a disk that is nearly full.
            preset: "granite-3.0-1b-a400m".into(),
            output,
            layers: Some(6),
            ty: "q8_0".into(),
            seed: 0,
            routing: Routing::Uniform,
            layout: Layout::Standard,
        }),
    };
    match result {
        Ok(written) => println!("wrote {} bytes", written.bytes_out),
        Err(e) => println!("ended: {e}"),
    }
    let status = fs::read_to_string("/proc/self/status").unwrap();
    println!("{}", status.lines().find(|line| line.starts_with("VmHWM")).unwrap());
}

fn start(task: &str, folder: &Path, shell: &str) -> Child {
    let program = std::env::current_exe().unwrap();
    Command::new("sh")
        .args(["-c", &format!("{shell} exec \"$0\" --exact process::child --ignored --nocapture")])
        .arg(program)
        .env(TASK, task)
        .env(FOLDER, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    assert_eq!(output.status.signal(), None);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn files(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name());
    names.map(|name| name.to_string_lossy().into_owned()).collect()
}

/// A limit on file sizes stands in for the end of the disk: the write fails the same way.
#[test]
fn a_full_disk_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let child = start("synth", folder.path(), "trap '' XFSZ; ulimit -f 65536;");
    let text = stdout(&child.wait_with_output().unwrap());
    assert!(text.contains("ended: ") && text.contains("out.gguf: File too large"), "{text}");
    assert_eq!(files(folder.path()), Vec::<String>::new());
}

#[test]
fn ctrl_c_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start("synth", folder.path(), "");
    let pid = rustix::process::Pid::from_child(&child);
    let start = Instant::now();
    // Once the unfinished file has data, the writing has begun.
    let begun = || {
        let sizes = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().metadata().unwrap());
        sizes.map(|m| m.len()).sum::<u64>() > 1 << 20
    };
    while !begun() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it was interrupted");
        assert!(start.elapsed() < Duration::from_secs(60), "no file appears");
        sleep(Duration::from_millis(5));
    }
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let text = stdout(&child.wait_with_output().unwrap());
    assert!(text.contains("ended: interrupted"), "{text}");
    assert_eq!(files(folder.path()), Vec::<String>::new());
}

/// 1.4 GiB of weights as a file with holes: what is read is zeros, what counts is how much of it
/// is in memory at a time.
#[test]
fn memory_does_not_grow_with_the_model() {
    const HIDDEN: u64 = 4096;
    const VOCAB: u64 = 49_152;
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    fs::create_dir(&checkpoint).unwrap();
    let golden = common::golden("llama");
    for file in ["tokenizer.model", "tokenizer_config.json"] {
        fs::copy(golden.join(file), checkpoint.join(file)).unwrap();
    }
    let text = fs::read(golden.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    for (field, value) in [
        ("hidden_size", HIDDEN),
        ("vocab_size", VOCAB),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 32),
        ("intermediate_size", 8192),
    ] {
        config[field] = json!(value);
    }
    config["tie_word_embeddings"] = json!(true);
    fs::write(checkpoint.join("config.json"), config.to_string()).unwrap();
    let weights = write_holes(&checkpoint.join("model.safetensors"), HIDDEN, VOCAB);

    let child = start("convert", folder.path(), "");
    let text = stdout(&child.wait_with_output().unwrap());
    assert!(text.contains("wrote "), "{text}");
    let peak = text.split("VmHWM:").nth(1).unwrap().split_whitespace().next().unwrap();
    let peak_bytes = peak.parse::<u64>().unwrap() * 1024;
    assert!(weights > 1 << 30 && peak_bytes < 128 << 20, "{peak_bytes} bytes for {weights}");
}

/// A safetensors file of one layer in f32; answers its size.
fn write_holes(path: &Path, hidden: u64, vocab: u64) -> u64 {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let square = [hidden, hidden];
    let tensors = [
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        (layer("input_layernorm"), vec![hidden]),
        (layer("post_attention_layernorm"), vec![hidden]),
        (layer("self_attn.q_proj"), square.to_vec()),
        (layer("self_attn.k_proj"), square.to_vec()),
        (layer("self_attn.v_proj"), square.to_vec()),
        (layer("self_attn.o_proj"), square.to_vec()),
        (layer("mlp.gate_proj"), vec![8192, hidden]),
        (layer("mlp.up_proj"), vec![8192, hidden]),
        (layer("mlp.down_proj"), vec![hidden, 8192]),
    ];
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 4 * shape.iter().product::<u64>();
        let info = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]});
        header.insert(name, info);
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length, header.as_bytes()].concat()).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
    end
}
