//! Events for policies: what the layer loop publishes, and what it computes for that alone.

use crate::backend::cpu::Cpu;
use crate::backend::cpu::acts::{ActSet, Kinds};
use crate::backend::ops::{NO_EXPERT, Route, RouteRows};
use crate::forward::batch::{Batch, Segment};
use crate::forward::scratch::{Buffers, rows_of};
use crate::model::Model;
use crate::model::weights::{Gate, Norm, Router};
use crate::policy::{Event, LookAhead, Phase, PromptRouted, Routed, Timing, Wants};
use std::ops::Range;
use std::time::Instant;

/// Buffers of what is published.
#[derive(Default)]
pub struct EventBuffers {
    embedding: Vec<f32>,              // [n_embd], the mean over a segment's rows
    ahead_h: Vec<f32>,                // [rows, n_embd]
    ahead_acts: ActSet,               // the form of it that a router reads
    pub(super) ahead_probs: Vec<f32>, // [rows, experts of that layer]
    counts: Vec<u32>,                 // [experts]
    probs: Vec<f32>,                  // [experts], the mean over a segment's rows
    /// Events that policies want to see: asked once a pass, because the answer may change at any
    /// time and the parts of a pass must agree on it.
    pub(super) wants: Wants,
    /// When the pass began.
    start: Option<Instant>,
    pub timing: Timing,
}

/// A layer's routing, with a row for each token of the batch, for those who hear of it.
pub(super) struct Routing<'a> {
    pub route: &'a Route,
    /// The router's input.
    pub h: &'a [f32],
    /// The stream that the input was made of.
    pub x: &'a [f32],
    pub events: &'a mut EventBuffers,
}

/// Listeners to what a layer's router chose.
#[derive(Clone, Copy)]
enum Audience {
    /// Evictions, before they name victims for that layer.
    Evictions,
    /// Predictors, with the layer whose router they see ahead of time.
    Predictors { ahead: Option<usize> },
}

/// Rows of one text in a layer.
struct LayerRows {
    layer: u32,
    request: u32,
    rows: Range<usize>,
}

impl EventBuffers {
    /// Whether `publish_routed` reads what a decode row's router saw, or where that comes from.
    pub(super) fn want_activation(&self) -> bool {
        self.wants.is_of_routed()
    }
}

impl Buffers {
    /// The routing of the present layer.
    pub(super) fn routing(&mut self) -> Routing<'_> {
        let Buffers { x, h, ffn, events, .. } = self;
        Routing { route: &ffn.route, h, x, events }
    }
}

impl Model {
    /// The number in the tiers whose router a policy wants to see applied to the activation of
    /// `number`. Tokens of one stack do not go through the other's layers.
    fn look_ahead_number(&self, number: usize, n_rows: usize) -> Option<usize> {
        let layer = |number: usize| self.hyper.layer_in_tier(number).0;
        let is_encoder = |number: usize| layer(number) < self.hyper.n_encoder_layers();
        // A device looks one row's experts up by itself.
        let next = self.hierarchy.look_ahead(number, n_rows == 1)?;
        (is_encoder(next) == is_encoder(number)).then_some(next)
    }

    /// Tells policies that a pass begins. `x` are the embeddings.
    pub(super) fn publish_start(&self, batch: &Batch, x: &[f32], e: &mut EventBuffers) {
        e.timing = Timing::default();
        e.start = Some(Instant::now());
        e.wants = Wants::default();
        if !self.hierarchy.has_policies() {
            return;
        }
        for (rows, &Segment { request, phase, .. }) in batch.segments() {
            let embedding = &mut e.embedding;
            mean_of_rows(rows_of(x, &rows, self.hyper.n_embd), self.hyper.n_embd, embedding);
            let token = (phase == Phase::Decode).then(|| batch.tokens()[rows.start]);
            self.hierarchy.publish(&Event::IterationStart { request, phase, token, embedding });
        }
        e.wants = self.hierarchy.wants();
    }

    /// Tells policies what the router of layer `l` chose for each segment.
    pub(super) fn publish_routed(
        &self,
        cpu: &Cpu,
        batch: &Batch,
        l: usize,
        routing: &mut Routing<'_>,
    ) {
        self.publish_choice(batch, l, routing);
        self.publish_look_ahead(cpu, batch, l, routing);
    }

    /// The first half of `publish_routed`: evictions hear of it, which takes next to no time, so
    /// that they know of it when the layer's demand makes them name victims.
    pub(super) fn publish_choice(&self, batch: &Batch, l: usize, routing: &mut Routing<'_>) {
        if self.has_router(l) {
            self.publish_choice_at(batch, self.hyper.tier_layer(l), routing);
        }
    }

    /// `publish_choice` of a number in the tiers.
    pub(super) fn publish_choice_at(
        &self,
        batch: &Batch,
        number: usize,
        routing: &mut Routing<'_>,
    ) {
        if self.hierarchy.has_policies() {
            self.publish_to(Audience::Evictions, batch, number, routing);
        }
    }

    /// The second half: predictors hear of it, with what they see ahead, which is computed for them
    /// while the layer's loads are in flight.
    pub(super) fn publish_look_ahead(
        &self,
        cpu: &Cpu,
        batch: &Batch,
        l: usize,
        routing: &mut Routing<'_>,
    ) {
        if self.has_router(l) {
            self.publish_look_ahead_at(cpu, batch, self.hyper.tier_layer(l), routing);
        }
    }

    /// `publish_look_ahead` of a number in the tiers.
    pub(super) fn publish_look_ahead_at(
        &self,
        cpu: &Cpu,
        batch: &Batch,
        number: usize,
        routing: &mut Routing<'_>,
    ) {
        if !self.hierarchy.has_policies() {
            return;
        }
        let decoded = batch.decode_rows();
        let is_wanted = routing.events.wants.ahead && !decoded.is_empty();
        let ahead = is_wanted.then(|| self.look_ahead_number(number, batch.n_rows())).flatten();
        // A device's stream is here only if it is wanted.
        let ahead = ahead.filter(|next| {
            let x = rows_of(routing.x, &decoded, self.hyper.n_embd);
            match self.hyper.layer_in_tier(*next) {
                (layer, false) => self.look_ahead(cpu, layer, x, routing.events),
                (layer, true) => self.look_ahead_at_values(cpu, layer, x, routing.events),
            }
        });
        ahead.iter().for_each(|_| self.hierarchy.count_look_ahead());
        self.publish_to(Audience::Predictors { ahead }, batch, number, routing);
    }

    fn publish_to(
        &self,
        audience: Audience,
        batch: &Batch,
        number: usize,
        routing: &mut Routing<'_>,
    ) {
        for (rows, &Segment { request, phase, .. }) in batch.segments() {
            let part = |rows| LayerRows { layer: number as u32, request, rows };
            match phase {
                Phase::Decode => rows.for_each(|row| {
                    let routed = self.routed_row(audience, &part(row..row + 1), routing);
                    self.tell(audience, &Event::Routed(routed));
                }),
                Phase::Prompt => {
                    let routed = prompt_routed(&part(rows), routing);
                    self.tell(audience, &Event::PromptRouted(routed));
                }
            }
        }
    }

    fn tell(&self, audience: Audience, event: &Event) {
        match audience {
            Audience::Evictions => self.hierarchy.publish_to_evictions(event),
            Audience::Predictors { .. } => self.hierarchy.publish_to_predictors(event),
        }
    }

    /// The routing of a decode step's row. Rows of decode are the first ones, and
    /// `events.ahead_probs` has no others.
    fn routed_row<'a>(
        &self,
        audience: Audience,
        row: &LayerRows,
        routing: &'a Routing<'_>,
    ) -> Routed<'a> {
        let LayerRows { layer, request, ref rows } = *row;
        let RouteRows { chosen, probs, .. } = routing.route.rows(rows);
        let routed = Routed { request, layer, chosen, probs, hidden: &[], ahead: None };
        let Audience::Predictors { ahead } = audience else { return routed };
        let ahead = ahead.map(|next| {
            let experts = self.weights.in_tier(&self.hyper, next).expect("a layer that is told");
            let probs = rows_of(&routing.events.ahead_probs, rows, experts.n_experts);
            LookAhead { layer: next as u32, probs }
        });
        let hidden = match routing.events.wants.hidden {
            true => rows_of(routing.h, rows, self.hyper.n_embd),
            false => &[],
        };
        Routed { hidden, ahead, ..routed }
    }

    /// Applies a later layer's router to `x`, the present stream of some rows (MoEpic, Eq. 3), into
    /// `e.ahead_probs`; false if that layer has no router.
    pub(super) fn look_ahead(
        &self,
        cpu: &Cpu,
        layer: usize,
        x: &[f32],
        e: &mut EventBuffers,
    ) -> bool {
        let Some(ffn) = &self.weights.layers[layer].ffn else { return false };
        let Gate::Router(router) = &ffn.gate else { return false };
        let norm = ffn.router_norm().unwrap_or(&ffn.norm);
        self.look_ahead_by(cpu, router, Some(norm).filter(|_| !ffn.routes_stream), x, e);
        true
    }

    /// `look_ahead` by the router of a layer's values.
    fn look_ahead_at_values(
        &self,
        cpu: &Cpu,
        layer: usize,
        x: &[f32],
        e: &mut EventBuffers,
    ) -> bool {
        let Some(values) = self.weights.values_of(layer) else { return false };
        self.look_ahead_by(cpu, &values.router, Some(&self.weights.layers[layer].norm), x, e);
        true
    }

    fn look_ahead_by(
        &self,
        cpu: &Cpu,
        router: &Router,
        norm: Option<&Norm>,
        x: &[f32],
        e: &mut EventBuffers,
    ) {
        let n_embd = self.hyper.n_embd;
        let n = x.len() / n_embd;
        let EventBuffers { ahead_h, ahead_acts, ahead_probs, .. } = e;
        ahead_h.resize(x.len(), 0.0);
        match norm {
            None => ahead_h.copy_from_slice(x),
            Some(norm) => self.norm(cpu, norm, x, ahead_h),
        }
        let logits = &router.logits;
        ahead_acts.fill(cpu, Kinds::of([logits.weight.ty]), n, n_embd, ahead_h);
        cpu.products([self.linear(logits, ahead_acts, ahead_probs, n)]);
        for probs in ahead_probs.chunks_exact_mut(logits.weight.rows) {
            self.hyper.routing.choice.score.probabilities(cpu.kernels, probs);
            // A bias that chooses is part of the forecast.
            if let Some(bias) = &router.choice_bias {
                probs.iter_mut().zip(bias).for_each(|(p, bias)| *p += bias);
                into_unit_range(probs);
            }
        }
    }

    /// Tells predictors what the layers' routers make of a state: that of a text's next token, in
    /// `row` of the stream.
    pub(crate) fn publish_next_token(&self, cpu: &Cpu, request: u32, row: usize, b: &mut Buffers) {
        let (x, e) = (rows_of(&b.x, &(row..row + 1), self.hyper.n_embd), &mut b.events);
        let n_experts = self.hyper.routing.n_experts;
        for layer in self.hyper.decoder_layers() {
            if self.has_router(layer) && self.look_ahead(cpu, layer, x, e) {
                let probs = rows_of(&e.ahead_probs, &(0..1), n_experts);
                let ahead = LookAhead { layer: self.hyper.tier_layer(layer) as u32, probs };
                self.hierarchy.publish_to_predictors(&Event::NextToken { request, ahead });
            }
        }
    }

    /// Tells policies that the pass has ended. A segment's part of its time is that of its rows.
    pub(super) fn publish_end(&self, batch: &Batch, e: &mut EventBuffers) {
        let Some(start) = e.start.take().filter(|_| self.hierarchy.has_policies()) else {
            return;
        };
        e.timing.wall_ns = nanos_since(start);
        for (rows, &Segment { request, phase, .. }) in batch.segments() {
            let timing = e.timing.part(rows.len(), batch.n_rows());
            self.hierarchy.publish(&Event::IterationEnd { request, phase, timing });
        }
    }
}

pub(super) fn nanos_since(start: Instant) -> u64 {
    start.elapsed().as_nanos() as u64
}

fn prompt_routed<'a>(rows: &LayerRows, routing: &'a mut Routing<'_>) -> PromptRouted<'a> {
    let LayerRows { layer, request, ref rows } = *rows;
    let (route, e) = (routing.route.rows(rows), &mut *routing.events);
    let n_tokens = count(route, &mut e.counts);
    mean_of_rows(route.probs, route.n_experts, &mut e.probs);
    let (counts, probs, chosen) = (&e.counts[..], &e.probs[..], route.chosen);
    PromptRouted { request, layer, n_tokens, counts, probs, chosen }
}

/// Counts the tokens of each expert; answers how many tokens there are.
fn count(route: RouteRows, counts: &mut Vec<u32>) -> u32 {
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

/// Maps values that may lie outside of 0 to 1 into that range; their order stays.
fn into_unit_range(values: &mut [f32]) {
    let low = values.iter().copied().fold(0.0, f32::min);
    let high = values.iter().copied().fold(1.0, f32::max);
    values.iter_mut().for_each(|v| *v = (*v - low) / (high - low));
}
