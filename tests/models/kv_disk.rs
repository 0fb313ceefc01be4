//! Texts that come back from disk, with the bytes that they have alone.

use common::jobs::{alone, core, prompt, run};
use common::{convert_golden, golden_options, load};
use moeba::engine::kv_disk::KvFolder;
use moeba::engine::scheduler::Core;
use moeba::engine::{Engine, EngineOptions};
use std::path::Path;
use std::sync::Arc;

/// Room for all pages and states of a test.
const ROOM: usize = 64 << 20;

fn model(name: &str, options: EngineOptions) -> Arc<Engine> {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden(name, "f32", dir.path());
    let (n_ctx, n_ubatch) = (Some(512), Some(100));
    load(&path, &EngineOptions { n_ctx, n_ubatch, n_threads: Some(1), ..options })
}

/// Computes texts with a folder behind; returns how many tokens came from it, and how many files
/// were damaged.
fn reused(engine: &Arc<Engine>, folder: &Path, page_bytes: usize, prompts: &[&[u32]]) -> [u64; 2] {
    let sessions = vec![engine.new_session().unwrap()];
    let folder = KvFolder::open(folder, None).unwrap();
    let mut core = Core::on_disk(engine, sessions, 0.5, page_bytes, folder).unwrap();
    let (texts, status) = run(engine, &mut core, prompts);
    for (i, prompt) in prompts.iter().enumerate() {
        assert_eq!(texts[i], alone(engine, prompt), "text {i}");
    }
    core.finish_saving();
    [status.counts.n_reused, status.disk.unwrap().n_damaged]
}

#[test]
fn a_text_on_disk_goes_on_with_its_own_bytes() {
    let first = prompt(300, 200, 1);
    let longer = [&first[..], &[9; 20]].concat();
    // One with latent attention, and one with a recurrent state.
    for name in ["qwen3moe", "deepseek_v2", "qwen3next"] {
        let engine = model(name, golden_options());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        assert_eq!(reused(&engine, path, ROOM, &[&first]), [0, 0], "{name}");
        // The first prompt's last whole page.
        assert_eq!(reused(&engine, path, ROOM, &[&longer]), [256, 0], "{name}");
        // Another text takes the session between.
        let other = prompt(100, 0, 2);
        let n = reused(&engine, path, ROOM, &[&longer, &other, &longer]);
        assert!(n[0] >= 2 * 256 && n[1] == 0, "{name}: {n:?}");
        if name != "qwen3next" {
            assert_eq!(reused(&engine, path, 0, &[&first, &first])[1], 0, "{name}");
        }
        // Each file has a changed byte somewhere.
        for (i, file) in std::fs::read_dir(path).unwrap().enumerate() {
            let file = file.unwrap().path();
            if file.extension().is_some() {
                let mut bytes = std::fs::read(&file).unwrap();
                let at = 97 * i % bytes.len();
                bytes[at] ^= 1;
                std::fs::write(&file, bytes).unwrap();
            }
        }
        let n = reused(&engine, path, ROOM, &[&longer]);
        assert!(n[0] == 0 && n[1] >= 1, "{name}: {n:?}");
    }
}

#[test]
fn other_models_and_other_caches_have_other_texts() {
    let text = prompt(300, 200, 1);
    let folder = tempfile::tempdir().unwrap();
    let n = |engine: &Arc<Engine>| reused(engine, folder.path(), ROOM, &[&text])[0];
    let engine = model("qwen3moe", golden_options());
    assert_eq!(n(&engine), 0);
    let halves = EngineOptions { cache_type_v: "bf16".parse().unwrap(), ..golden_options() };
    assert_eq!(n(&model("qwen3moe", halves)), 0);
    assert_eq!(n(&model("mixtral", golden_options())), 0);
    // A key that positions depend on.
    let overrides = vec!["qwen3moe.rope.freq_base=float:5000".parse().unwrap()];
    assert_eq!(n(&model("qwen3moe", EngineOptions { overrides, ..golden_options() })), 0);
    assert_eq!(n(&engine), 256);
    let mut without = core(&engine, 1, 0);
    assert_eq!(run(&engine, &mut without, &[&text]).1.counts.n_reused, 0);
}
