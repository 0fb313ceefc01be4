//! The routed experts of a file, in either layout: how many, how large, how they are cut.

use super::summary::counted;
use crate::Result;
use crate::experts::{ExpertTensors, LayerExperts as Cut};
use crate::gguf::{Gguf, TensorInfo};
use crate::model::granules::{self, GranuleKeys};
use crate::units::size;
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The routed experts of one layer.
pub struct LayerExperts {
    layer: usize,
    n_experts: u64,
    /// Bytes of one expert, all its matrices together.
    expert_bytes: u64,
    /// Granules an expert; `None` where the tensors are not gate, up and down.
    n_granules: Option<usize>,
    /// Bytes of the largest granule.
    granule_bytes: Option<u64>,
}

impl LayerExperts {
    fn of(layer: usize, experts: &Cut) -> LayerExperts {
        LayerExperts {
            layer,
            n_experts: experts.n_experts as u64,
            expert_bytes: experts.expert_bytes() as u64,
            n_granules: Some(experts.geometry.n_granules()),
            granule_bytes: Some(experts.granule_bytes(0) as u64),
        }
    }

    pub fn json(&self) -> Json {
        json!({
            "layer": self.layer, "n_experts": self.n_experts, "expert_bytes": self.expert_bytes,
            "n_granules": self.n_granules, "granule_bytes": self.granule_bytes,
        })
    }
}

/// Layers that have tensors `blk.L.ffn_…_exps.weight`, in order; of an encoder–decoder the layers
/// of both stacks, the encoder's first.
pub fn all(gguf: &Gguf) -> Result<Vec<LayerExperts>> {
    let keys = GranuleKeys::read(gguf)?;
    let mut layers: BTreeMap<usize, Vec<(&str, usize)>> = BTreeMap::new();
    let n_encoder = match gguf.str("general.architecture")? {
        Some(name) => gguf.u32(&format!("{name}.block_count"))?.unwrap_or(0) as usize,
        None => 0,
    };
    for (index, tensor) in gguf.tensors().iter().enumerate() {
        if let Some((layer, part)) = expert_part(&tensor.name, n_encoder) {
            layers.entry(layer).or_default().push((part, index));
        }
    }
    let mut all = Vec::new();
    for (layer, parts) in layers {
        let woven = match &keys {
            Some(keys) => keys.layer_as_written(gguf, layer)?,
            None => None,
        };
        match woven {
            Some(typed) => all.push(LayerExperts::of(layer, &typed.experts)),
            None => all.extend(stacked(gguf.tensors(), layer, &parts)),
        }
    }
    Ok(all)
}

/// Layer and part (`ffn_gate_exps`, …) of an expert tensor's name.
fn expert_part(name: &str, n_encoder: usize) -> Option<(usize, &str)> {
    let (name, before) = match name.strip_prefix("dec.") {
        Some(name) => (name, n_encoder),
        None => (name.strip_prefix("enc.").unwrap_or(name), 0),
    };
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let part = part.strip_suffix(".weight").filter(|part| part.ends_with("_exps"))?;
    Some((layer.parse::<usize>().ok()? + before, part))
}

fn stacked(tensors: &[TensorInfo], layer: usize, parts: &[(&str, usize)]) -> Option<LayerExperts> {
    // The last dimension counts the experts; all parts must agree to be called experts.
    let n_experts = *tensors[parts.first()?.1].dims.get(2)?;
    if parts.iter().any(|(_, t)| tensors[*t].dims.get(2) != Some(&n_experts)) {
        return None;
    }
    if let Some(cut) = cut(tensors, parts, n_experts) {
        return Some(LayerExperts::of(layer, &cut));
    }
    let expert_bytes = parts.iter().map(|(_, t)| tensors[*t].n_bytes / n_experts).sum();
    Some(LayerExperts { layer, n_experts, expert_bytes, n_granules: None, granule_bytes: None })
}

/// The engine's granules for these experts, if the tensors are up, down and perhaps gate, and
/// nothing else.
fn cut(tensors: &[TensorInfo], parts: &[(&str, usize)], n_experts: u64) -> Option<Cut> {
    let part = |name: &str| parts.iter().find(|(part, _)| *part == name).map(|(_, t)| *t);
    let (gate, up) = (part("ffn_gate_exps"), part("ffn_up_exps")?);
    let down = part("ffn_down_exps")?;
    let [n_embd, n_ff] = tensors[up].dims[..2].try_into().ok()?;
    let fits = gate.is_none_or(|gate| tensors[gate].dims[..2] == [n_embd, n_ff])
        && tensors[down].dims[..2] == [n_ff, n_embd];
    if !fits || parts.len() != 2 + usize::from(gate.is_some()) {
        return None;
    }
    let types = (gate.map(|gate| tensors[gate].ty), tensors[up].ty, tensors[down].ty);
    granules::cut(types, [n_embd, n_ff, n_experts], ExpertTensors::Stacked { gate, up, down })
}

/// One line a run of layers that are alike.
pub fn table(layers: &[LayerExperts], out: &mut String) {
    if layers.is_empty() {
        return;
    }
    let total: u64 = layers.iter().map(|e| e.n_experts * e.expert_bytes).sum();
    let _ = writeln!(out, "\nExperts ({} in all)", size(total));
    let alike = |a: &LayerExperts, b: &LayerExperts| {
        (a.n_experts, a.expert_bytes, a.granule_bytes)
            == (b.n_experts, b.expert_bytes, b.granule_bytes)
            && a.layer + 1 == b.layer
    };
    for run in layers.chunk_by(alike) {
        let (first, last) = (&run[0], &run[run.len() - 1]);
        let granules = match (first.n_granules, first.granule_bytes) {
            (Some(n), Some(bytes)) => {
                format!(", {} of up to {} each", counted(n, "granule"), size(bytes))
            }
            _ => String::new(),
        };
        let _ = writeln!(
            out,
            "  layers {} to {}: {} experts a layer, {} each{granules}",
            first.layer,
            last.layer,
            first.n_experts,
            size(first.expert_bytes),
        );
    }
}
