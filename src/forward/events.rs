//! What the layer loop tells the policy, and what it computes for that alone.

use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::Kinds;
use crate::backend::ops::{NO_EXPERT, Route};
use crate::forward::Buffers;
use crate::model::Model;
use crate::model::weights::Gate;
use crate::policy::{Ahead, Event, Phase, PromptRouted, Routed, Timing};
use std::time::Instant;

/// Buffers of what is published.
#[derive(Default)]
pub struct Published {
    embedding: Vec<f32>,              // [n_embd], the mean over the tokens
    ahead_h: Vec<f32>,                // [n_embd]
    pub(super) ahead_probs: Vec<f32>, // [experts of that layer]
    counts: Vec<u32>,                 // [experts]
    probs: Vec<f32>,                  // [experts], the mean over the tokens
    pub timing: Timing,
}

/// Whose forward pass it is, and since when.
#[derive(Clone, Copy)]
pub struct Pass {
    pub request: u32,
    pub phase: Phase,
    pub start: Instant,
}

impl Pass {
    pub fn new(request: u32, n_tokens: usize) -> Pass {
        let phase = if n_tokens > 1 { Phase::Prompt } else { Phase::Decode };
        Pass { request, phase, start: Instant::now() }
    }
}

impl Model {
    /// Whether a policy hears `publish`.
    pub(super) fn listens(&self) -> bool {
        self.routed.listens() || self.tiers.as_ref().is_some_and(|tiers| tiers.listens())
    }

    /// Whether a policy wants what routers see.
    pub(super) fn wants_hidden(&self) -> bool {
        self.routed.wants_hidden() || self.tiers.as_ref().is_some_and(|tiers| tiers.wants_hidden())
    }

    /// The layer whose router a policy wants to see applied to layer `l`'s activation. Tokens of
    /// one stack do not go through the other's layers.
    pub(super) fn looks_ahead(&self, l: usize) -> Option<usize> {
        let tiers = || self.tiers.as_ref().and_then(|tiers| tiers.looks_ahead(l));
        let is_encoder = |l: usize| l < self.hyper.n_encoder_layers();
        let next = self.routed.looks_ahead(l).or_else(tiers)?;
        (is_encoder(next) == is_encoder(l)).then_some(next)
    }

    /// Whether a token's `publish_routed` reads what the router saw or where that comes from.
    pub(super) fn wants_activation(&self, l: usize) -> bool {
        self.wants_hidden() || self.looks_ahead(l).is_some()
    }

    /// The embeddings are in `b.x`.
    pub(super) fn publish_start(&self, b: &mut Buffers, pass: Pass) {
        b.published.timing = Timing::default();
        if !self.listens() {
            return;
        }
        let embedding = &mut b.published.embedding;
        mean_of_rows(&b.x, self.hyper.n_embd, embedding);
        let Pass { request, phase, .. } = pass;
        self.publish(&Event::IterationStart { request, phase, embedding });
    }

    /// The layer's routing is in `b.route`, what the router saw in `b.h`.
    pub(super) fn publish_routed(&self, cpu: &Cpu, b: &mut Buffers, l: usize, pass: Pass) {
        if !self.has_router(l) || !self.listens() {
            return;
        }
        match pass.phase {
            Phase::Decode => self.publish_token(cpu, b, l, pass.request),
            Phase::Prompt => {
                let p = &mut b.published;
                let n_tokens = count(&b.route, &mut p.counts);
                mean_of_rows(&b.route.probs, b.route.n_experts, &mut p.probs);
                let (request, layer) = (pass.request, l as u32);
                let (counts, probs) = (&p.counts[..], &p.probs[..]);
                let routed = PromptRouted { request, layer, n_tokens, counts, probs };
                self.publish(&Event::PromptRouted(routed));
            }
        }
    }

    fn publish_token(&self, cpu: &Cpu, b: &mut Buffers, l: usize, request: u32) {
        let ahead = self.looks_ahead(l).filter(|next| self.look_ahead(cpu, b, *next));
        let ahead = ahead.map(|next| Ahead { layer: next as u32, probs: &b.published.ahead_probs });
        let hidden = if self.wants_hidden() { &b.h[..] } else { &[] };
        let (layer, route) = (l as u32, &b.route);
        let (chosen, probs) = (&route.chosen[..], &route.probs[..]);
        self.publish(&Event::Routed(Routed { request, layer, chosen, probs, hidden, ahead }));
    }

    /// How a later layer's router sees the present activation (MoEpic, Eq. 3); false where that
    /// layer has none.
    pub(super) fn look_ahead(&self, cpu: &Cpu, b: &mut Buffers, layer: usize) -> bool {
        let ffn = &self.weights.layers[layer].ffn;
        let Gate::Router(router) = &ffn.gate else { return false };
        let Published { ahead_h, ahead_probs, .. } = &mut b.published;
        ahead_h.resize(b.x.len(), 0.0);
        self.norm(cpu, &ffn.norm, &b.x, ahead_h);
        let logits = &router.logits;
        b.ahead_acts.fill(cpu, Kinds::of([logits.weight.ty]), 1, self.hyper.n_embd, ahead_h);
        cpu.products([self.linear(logits, &b.ahead_acts, ahead_probs, 1)]);
        self.hyper.routing.choice.score.probabilities(cpu.kernels, ahead_probs);
        // A bias that chooses is part of the forecast.
        if let Some(bias) = &router.choice_bias {
            ahead_probs.iter_mut().zip(bias).for_each(|(p, bias)| *p += bias);
            into_unit_range(ahead_probs);
        }
        true
    }

    pub(super) fn publish_end(&self, b: &mut Buffers, pass: Pass) {
        if !self.listens() {
            return;
        }
        let timing = &mut b.published.timing;
        timing.wall_ns = nanos_since(pass.start);
        let (Pass { request, phase, .. }, timing) = (pass, *timing);
        self.publish(&Event::IterationEnd { request, phase, timing });
    }
}

pub(super) fn nanos_since(start: Instant) -> u64 {
    start.elapsed().as_nanos() as u64
}

/// Tokens of each expert; answers how many tokens there are.
fn count(route: &Route, counts: &mut Vec<u32>) -> u32 {
    counts.clear();
    counts.resize(route.n_experts, 0);
    let chosen = route.chosen.iter().filter(|expert| **expert != NO_EXPERT);
    chosen.for_each(|expert| counts[*expert as usize] += 1);
    (route.chosen.len() / route.k) as u32
}

fn mean_of_rows(rows: &[f32], width: usize, mean: &mut Vec<f32>) {
    mean.clear();
    mean.resize(width, 0.0);
    for row in rows.chunks_exact(width) {
        mean.iter_mut().zip(row).for_each(|(mean, x)| *mean += x);
    }
    let n = (rows.len() / width).max(1) as f32;
    mean.iter_mut().for_each(|mean| *mean /= n);
}

/// Moves and squeezes values that are no probabilities to where such are; their order stays.
fn into_unit_range(values: &mut [f32]) {
    let low = values.iter().copied().fold(0.0, f32::min);
    let high = values.iter().copied().fold(1.0, f32::max);
    values.iter_mut().for_each(|v| *v = (*v - low) / (high - low));
}
