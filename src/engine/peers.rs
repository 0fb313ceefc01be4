//! Experts on other machines: what both ends must have in common, a head's connection to its peers,
//! and a peer's work.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::plan::MemoryPlan;
use super::plan::ram::Place;
use super::{ARITHMETIC, Engine, EngineOptions};
use crate::experts::peers::{self, Facts, Greeting, ModelKey, PeerCounters, Peers, Request};
pub use crate::experts::peers::{
    EXPERTS as EXPERTS_ROUTE, GREETING as GREETING_ROUTE, MAX_REQUEST_BYTES as MAX_EXPERTS_BYTES,
};
use crate::forward::PeerBuffers;
use crate::gguf::Gguf;
use crate::model::Bound;
use crate::{Error, Result};

/// The version of the program, with the commit of a build from a clone.
pub fn version() -> String {
    let commit = option_env!("MOEBA_COMMIT").map(|commit| format!(" ({commit})"));
    format!("{}{}", env!("CARGO_PKG_VERSION"), commit.unwrap_or_default())
}

/// The bytes of each type of a file's tensors.
pub(crate) fn tensor_types(gguf: &Gguf) -> String {
    let mut types = BTreeMap::new();
    for tensor in gguf.tensors() {
        *types.entry(tensor.ty.name()).or_insert(0u64) += tensor.n_bytes;
    }
    let types: Vec<String> = types.iter().map(|(name, n)| format!("{name} {n}")).collect();
    types.join(", ")
}

fn facts(gguf: &Gguf) -> Result<Facts> {
    let digits = gguf.identity()?.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    Ok(Facts {
        version: version(),
        arithmetic: ARITHMETIC,
        model: digits,
        tensor_types: tensor_types(gguf),
    })
}

/// The peers of a head whose experts are planned; none where they are all in memory.
pub(super) fn connect(
    bound: &Bound,
    plan: &MemoryPlan,
    options: &EngineOptions,
) -> Result<Option<Arc<Peers>>> {
    if options.peers.urls.is_empty() {
        return Ok(None);
    }
    let Place::Streamed { budget } = plan.place else {
        log::warn!("--peers has no effect: all experts are in this machine's memory");
        return Ok(None);
    };
    let in_tier = bound.in_tier();
    let n_experts = in_tier.iter().map(|layer| layer.as_ref().map_or(0, |layer| layer.n_experts));
    let peers = Peers::connect(&options.peers, facts(bound.gguf())?, budget, n_experts.collect())?;
    let (n_up, n) = peers.count();
    log::info!("{n_up} of {n} peers compute experts");
    Ok(Some(Arc::new(peers)))
}

/// The experts of a model at work for other machines.
pub struct ExpertsWork {
    engine: Arc<Engine>,
    facts: Facts,
    key: ModelKey,
    buffers: Mutex<PeerBuffers>,
}

/// Evicts by what it is asked for, and brings nothing unasked: which experts come next, the head
/// knows alone.
const POLICY: &str = "predictor=none,eviction=scan-resistant";

impl ExpertsWork {
    /// Options of an engine that computes experts for others: texts are on other machines.
    pub fn engine_options() -> EngineOptions {
        EngineOptions {
            n_ctx: Some(1),
            policy: POLICY.parse().expect("parts of policies"),
            only_experts: true,
            without_text: true,
            ..EngineOptions::default()
        }
    }

    /// An error if the model has no routed experts.
    pub fn new(engine: Arc<Engine>) -> Result<ExpertsWork> {
        if engine.plan.sizes.expert_bytes == 0 {
            let file = engine.gguf().path().display();
            return Err(Error::invalid(format!("{file}: the model has no experts to compute")));
        }
        let facts = facts(engine.gguf())?;
        Ok(ExpertsWork { key: facts.key(), engine, facts, buffers: Mutex::default() })
    }

    /// The answer to a head that asks what this is, as JSON.
    pub fn greeting(&self) -> serde_json::Value {
        let plan = &self.engine.plan;
        let memory = match plan.place {
            Place::InPlace => plan.sizes.expert_bytes,
            Place::Streamed { budget } => budget,
        };
        serde_json::json!(Greeting { facts: self.facts.clone(), memory })
    }

    /// Computes what the body of a request asks for: the body of the answer. An error of another
    /// kind than [`Error::Load`] is the request's.
    pub fn compute(&self, body: &[u8]) -> Result<Vec<u8>> {
        let request =
            Request::read(body).map_err(|why| Error::invalid(format!("the request {why}")))?;
        let model = &self.engine.model;
        // What a panic leaves behind is not read.
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        self.engine.compute.with_cpu(|cpu| {
            let rows = model.experts_for_head(cpu, &self.key, &request, &mut buffers)?;
            self.engine.check_files()?;
            let width = rows.len() / request.rows.len().max(1);
            Ok(peers::answer(rows, width.max(1)))
        })
    }
}

impl Engine {
    /// Counts of what peers have computed; `None` without peers.
    pub fn peer_counters(&self) -> Option<PeerCounters> {
        self.model.hierarchy().peers().map(Peers::counters)
    }

    /// Peers that can be asked now, and all there are; `None` without peers.
    pub fn n_peers(&self) -> Option<(usize, usize)> {
        self.model.hierarchy().peers().map(Peers::count)
    }
}
