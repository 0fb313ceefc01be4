//! A smaller model that drafts for another one (`-md`): which serve, and how they are loaded.

use std::path::Path;

use super::{DeviceChoice, EngineOptions, ProfileChoice};
use crate::experts::disk::IoKind;
use crate::model::Bound;
use crate::model::kv::{CacheType, KvCache};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

use super::plan::ram::RamBudget;

/// Options of the draft model of an engine with these `options`, whose sessions hold `n_ctx`
/// tokens, or all of them together if they share their memory. The draft model is in memory as a
/// whole, and the CPU computes it.
pub fn options(options: &EngineOptions, n_ctx: usize) -> EngineOptions {
    EngineOptions {
        n_ctx: Some(n_ctx),
        memory: options.memory,
        n_sessions: options.n_sessions,
        kv_unified: options.kv_unified,
        n_batch: options.n_batch,
        n_ubatch: options.n_ubatch,
        n_threads: options.n_threads,
        cache_type_k: options.cache_type_k,
        cache_type_v: options.cache_type_v,
        mmap: options.mmap,
        ram: RamBudget::Percent(100.0),
        io: IoKind::Auto,
        device: DeviceChoice::Cpu,
        profile: ProfileChoice::Nowhere,
        without_text: true,
        ..EngineOptions::default()
    }
}

/// Fails if a model cannot draft texts of the model with this tokenizer: if it does not continue
/// texts, cannot go back behind a draft that is refused, or has other tokens.
pub fn check(path: &Path, draft: &Bound, its: &Tokenizer, tokenizer: &Tokenizer) -> Result<()> {
    let hyper = draft.hyper();
    let fail = |why: &str| {
        Err(Error::invalid(format!("{}: the model cannot draft (-md): {why}", path.display())))
    };
    if hyper.encoder.is_some() || hyper.embeds || hyper.sees_all {
        return fail("it does not continue texts");
    }
    let cache = KvCache::new(&hyper.cache_shapes(), 1, CacheType::F16, CacheType::F16);
    if cache.has_state() {
        return fail("it has a recurrent state, which a refused draft cannot be taken out of");
    }
    // Models of one family have different numbers of unused tokens at the end.
    let n = its.n_vocab().min(tokenizer.n_vocab()) as u32;
    let differs = |id: &u32| its.text(*id).ok() != tokenizer.text(*id).ok();
    match (0..n).find(differs) {
        Some(id) => fail(&format!("its token {id} is another one than the model's")),
        None => Ok(()),
    }
}
