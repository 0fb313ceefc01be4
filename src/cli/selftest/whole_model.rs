//! A whole random model on a device and on the CPU: a prompt and decoded tokens, with all experts
//! in VRAM and with a part of them.

use crate::backend::selftest::Report;
use crate::convert::{Layout, Routing, SynthOptions, synth};
use crate::engine::plan::ram::VramBudget;
use crate::engine::{CacheType, DeviceChoice, Engine, EngineOptions, Want};
use crate::{Result, interrupt};
use std::path::{Path, PathBuf};

/// A published model's shapes, small enough to be made and read in seconds.
const PRESET: &str = "granite-3.0-1b-a400m";
const LAYERS: u32 = 3;
const PROMPT: usize = 70;
const DECODED: usize = 10;

/// A file that is removed in the end.
struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // What cannot be removed is left to the system.
        let _ = std::fs::remove_file(&self.0);
    }
}

pub fn check(device: &DeviceChoice) -> Result<Report> {
    let name = format!("moeba-selftest-{}.gguf", std::process::id());
    let file = TemporaryFile(std::env::temp_dir().join(name));
    synth(&SynthOptions {
        preset: PRESET.into(),
        output: file.0.clone(),
        layers: Some(LAYERS),
        ty: "q4_k_m".into(),
        seed: 0,
        routing: Routing::default(),
        layout: Layout::default(),
    })?;
    check_file(&file.0, device)
}

fn check_file(path: &Path, device: &DeviceChoice) -> Result<Report> {
    let mut report = Report::default();
    let expected = logits(path, &DeviceChoice::Cpu, "100%")?;
    for vram in ["100%", "40%"] {
        interrupt::check()?;
        report.row("whole model", vram, |row| {
            let got = logits(path, device, vram)?;
            let shape = format!("{} logits of {} tokens", got.len(), PROMPT + DECODED);
            row.bits(shape, &got, &expected);
            Ok(())
        });
    }
    Ok(report)
}

/// The logits of the last token of a prompt, and of tokens that are decoded one by one. The cache
/// is f32, as prompts' attention on tensor cores has other bits.
fn logits(path: &Path, device: &DeviceChoice, vram: &str) -> Result<Vec<f32>> {
    let options = EngineOptions {
        device: device.clone(),
        vram: vram.parse::<VramBudget>()?,
        n_ctx: Some(PROMPT + DECODED),
        cache_type_k: CacheType::F32,
        cache_type_v: CacheType::F32,
        ..EngineOptions::default()
    };
    let engine = Engine::load(path, &options, &mut |_| ())?;
    let mut session = engine.new_session()?;
    let tokens: Vec<u32> = (0..(PROMPT + DECODED) as u32).map(|i| 5 + 37 * i % 1000).collect();
    let (prompt, decoded) = tokens.split_at(PROMPT);
    let mut out = session.eval(prompt, Want::Last)?.all().to_vec();
    for token in decoded {
        out.extend_from_slice(session.eval(&[*token], Want::Last)?.all());
    }
    Ok(out)
}
