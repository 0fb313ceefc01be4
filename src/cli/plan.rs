//! `--dry-run`: where a model's bytes would be, without reading them.

use super::out;
use super::stats::mib;
use crate::Result;
use crate::engine::{Engine, EngineOptions};
use std::path::Path;

pub fn print(path: &Path, options: &EngineOptions) -> Result<()> {
    let engine = Engine::open(path, options)?;
    let (experts, dense) = engine.model().expert_and_dense_bytes();
    let kv = engine.kv_bytes();
    let line = |what: &str, bytes: u64, place: &str| {
        out::line(&format!("{what:<16} {:>12.1} MiB  {place}", mib(bytes)))
    };
    line("experts", experts, "all resident, in place on the mapped file")?;
    line("dense weights", dense, "resident, in place on the mapped file")?;
    line("KV cache", kv, &format!("memory, for {} tokens of context", engine.n_ctx()))?;
    line("together", experts + dense + kv, "")
}
