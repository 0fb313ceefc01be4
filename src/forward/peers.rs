//! The part of a layer's experts that other machines compute: sent before this machine's own part,
//! and put in its place after it. And the other end: experts that a head asks for.

use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::backend::ops::Demand;
use crate::experts::peers::{Answered, Layer, Peers, Request};
use crate::experts::peers::{Group, MAX_ANSWER_BYTES, ModelKey, PeerShare, answer_bytes};
use crate::experts::{Access, Acquisition};
use crate::forward::CpuPass;
use crate::forward::events::EventBuffers;
use crate::forward::moe::{self, FfnBuffers};
use crate::model::Model;
use crate::model::weights::{FfnWeights, Gate};
use crate::policy::{Event, Phase, Routed};
use crate::{Error, Result};

impl CpuPass<'_, '_> {
    fn peers(&self, ffn: &FfnWeights) -> Option<&Peers> {
        let is_routed = matches!(ffn.gate, Gate::Router(_));
        self.model.hierarchy.peers().filter(|_| is_routed)
    }

    /// Leaves to peers what is theirs of the experts in `f.order`.
    pub(super) fn deal_to_peers(&self, l: usize, ffn: &FfnWeights, f: &mut FfnBuffers) {
        let Some(peers) = self.peers(ffn) else { return };
        let FfnBuffers { demand, order, remote, n_own_misses, .. } = f;
        let host = self.model.hierarchy.host();
        let layer = Layer {
            index: self.model.hyper.tier_layer(l),
            n_embd: ffn.expert.n_embd,
            is_prompt: moe::access(self.batch, demand) == Access::Prompt,
            is_here: &|expert| host.is_whole(expert),
            n_pairs: &|expert| demand.pairs(demand.slot(expert)).len(),
        };
        peers.deal(&layer, order, remote);
        *n_own_misses = match remote.is_empty() {
            true => 0,
            false => order.iter().filter(|e| !host.is_whole(layer.id(**e))).count(),
        };
    }

    /// Sends peers the rows of their experts.
    pub(super) fn send_to_peers(&self, l: usize, ffn: &FfnWeights, f: &mut FfnBuffers) {
        let Some(peers) = self.peers(ffn) else { return };
        let kinds = Kinds::of(ffn.expert.inputs());
        let is_prompt = moe::access(self.batch, &f.demand) == Access::Prompt;
        for i in 0..f.remote.parts().len() {
            let FfnBuffers { demand, remote, packed, acts, .. } = &mut *f;
            let part = &remote.parts()[i];
            let (groups, rows, sent) = grouped(part, demand);
            packed.clear();
            sent.iter().for_each(|row| acts.pack(kinds, *row as usize, packed));
            let request = Request {
                key: peers.key(),
                layer: self.model.hyper.tier_layer(l) as u32,
                is_prompt,
                n_rows: sent.len(),
                groups,
                rows,
                acts: packed,
            };
            let body = request.to_bytes();
            peers.send(remote, i, body);
        }
    }

    /// Puts the rows that peers have computed in their places, and computes the others here.
    pub(super) fn take_from_peers(
        &self,
        l: usize,
        ffn: &FfnWeights,
        f: &mut FfnBuffers,
        e: &mut EventBuffers,
    ) -> Result<()> {
        let Some(peers) = self.peers(ffn) else { return Ok(()) };
        let stall_ns = f.work.stall_ns();
        peers.observe_own(f.n_own_misses, stall_ns, self.batch.decode_rows().is_empty());
        let FfnBuffers { demand, order, remote, expert: sums, work, .. } = &mut *f;
        order.clear();
        while let Some(answered) = peers.next(remote, &work.cancel)? {
            match answered {
                Answered::Lost(part) => order.extend(part.experts),
                Answered::Rows(part, answer) => {
                    let mut rows = answer.rows(&part);
                    for expert in &part.experts {
                        let sums = sums.partial_mut(demand.pairs(demand.slot(*expert)));
                        let (own, rest) = rows.split_at(4 * sums.len());
                        for (sum, bytes) in sums.iter_mut().zip(own.chunks_exact(4)) {
                            *sum = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                        }
                        rows = rest;
                    }
                }
            }
        }
        if order.is_empty() {
            return Ok(());
        }
        // In the order of the demand, in which those of decode come first.
        order.sort_unstable_by_key(|expert| demand.slot(*expert));
        self.model.experts_of(&ffn.gate).release(&mut f.work);
        self.acquire_part(l, ffn, &(0..f.order.len()), f);
        self.compute_part(l, ffn, f, e)
    }
}

/// The groups of a part, the place among the sent rows of each pair's row, and these rows.
fn grouped(part: &PeerShare, demand: &Demand) -> (Vec<Group>, Vec<u32>, Vec<u32>) {
    let pairs = |expert: &u32| demand.pairs(demand.slot(*expert));
    let group = |expert: &u32| Group { expert: *expert, n_pairs: pairs(expert).len() as u32 };
    let groups = part.experts.iter().map(group).collect();
    let rows = part.experts.iter().flat_map(pairs).map(|pair| demand.inputs()[pair]);
    let mut sent: Vec<u32> = rows.clone().collect();
    sent.sort_unstable();
    sent.dedup();
    let place = |row| sent.partition_point(|sent| *sent < row) as u32;
    let rows = rows.map(place).collect();
    (groups, rows, sent)
}

/// A peer's buffers, for one request at a time.
#[derive(Default)]
pub struct PeerBuffers {
    ffn: FfnBuffers,
    /// The layer of the last request.
    last_layer: u32,
}

impl Model {
    /// Computes the experts that a head asks for: a row of their width for each pair.
    pub fn experts_for_head<'b>(
        &self,
        cpu: &Cpu,
        key: &ModelKey,
        request: &Request<'_>,
        b: &'b mut PeerBuffers,
    ) -> Result<&'b [f32]> {
        let ffn = self.asked_layer(key, request)?;
        self.publish_asked(request, b);
        let (n_rows, n_embd) = (request.n_rows, ffn.expert.n_embd);
        let FfnBuffers { demand, order, work, expert: sums, granules, acts, .. } = &mut b.ffn;
        acts.unpack(Kinds::of(ffn.expert.inputs()), n_rows, n_embd, request.acts);
        let groups = request.groups.iter().map(|g| (g.expert, g.n_pairs as usize));
        demand.set(groups, &request.rows, self.hyper.routing.n_experts);
        order.clone_from(&demand.experts);
        sums.begin(demand.n_pairs(), ffn.expert.n_ff, n_embd, moe::inner(&ffn.expert));
        let store = &**self.hierarchy.host();
        let access = if request.is_prompt { Access::Prompt } else { Access::Decode };
        store.acquire(request.layer as usize, order, access, work);
        let mut compute = |work: &mut Acquisition| {
            while store.next_ready(work)? {
                let mut list = granules.list();
                moe::granules(store, work, demand, &ffn.expert, |_| true, &mut list);
                cpu.expert_granules(&list, demand, ffn.form(), acts, sums);
                granules.recycle(list);
            }
            Ok(())
        };
        let computed = compute(work);
        store.release(work);
        computed?;
        Ok(sums.partial(0..demand.n_pairs()))
    }

    /// The layer of a request that fits this model.
    fn asked_layer(&self, key: &ModelKey, request: &Request<'_>) -> Result<&FfnWeights> {
        let wrong = |why: String| Err(Error::Invalid(format!("the request {why}")));
        if request.key != *key {
            return wrong("is for another model, or for another version of moeba".into());
        }
        let (layer, is_of_values) = self.hyper.layer_in_tier(request.layer as usize);
        let layer = self.weights.layers.get(layer).filter(|_| !is_of_values);
        let ffn = layer.and_then(|layer| layer.ffn.as_ref());
        let Some(ffn) = ffn.filter(|ffn| matches!(ffn.gate, Gate::Router(_))) else {
            return wrong(format!("names layer {}, which has no experts", request.layer));
        };
        let n_experts = self.hyper.routing.n_experts;
        let mut named = vec![false; n_experts];
        for group in &request.groups {
            match named.get_mut(group.expert as usize) {
                Some(named) if !*named => *named = true,
                Some(_) => return wrong(format!("names expert {} twice", group.expert)),
                None => return wrong(format!("names expert {} of {n_experts}", group.expert)),
            }
        }
        let n_embd = ffn.expert.n_embd;
        let row_bytes = Kinds::of(ffn.expert.inputs()).packed_bytes(n_embd);
        if request.acts.len() != request.n_rows * row_bytes {
            let (n, rows) = (request.acts.len(), request.n_rows);
            return wrong(format!("has {n} bytes for {rows} rows of {row_bytes}"));
        }
        if answer_bytes(request.rows.len(), n_embd) > MAX_ANSWER_BYTES {
            return wrong(format!("asks for {} rows, more than an answer has", request.rows.len()));
        }
        Ok(ffn)
    }

    /// Tells evictions of a decode step's experts: those of prompts leave no trace here, either.
    fn publish_asked(&self, request: &Request<'_>, b: &mut PeerBuffers) {
        if request.is_prompt || !self.hierarchy.has_policies() {
            return;
        }
        let hierarchy = &self.hierarchy;
        if request.layer <= b.last_layer {
            let phase = Phase::Decode;
            let begins = Event::IterationStart { request: 0, phase, token: None, embedding: &[] };
            hierarchy.publish_to_evictions(&begins);
        }
        b.last_layer = request.layer;
        let chosen: Vec<u32> = request.groups.iter().map(|group| group.expert).collect();
        let (layer, chosen) = (request.layer, &chosen[..]);
        let routed = Routed { request: 0, layer, chosen, probs: &[], hidden: &[], ahead: None };
        hierarchy.publish_to_evictions(&Event::Routed(routed));
    }
}
