//! A tier at work: the state machine (`tier`), the mover that brings granules into its slots, and
//! the policy that decides what to prefetch and what to evict. RAM and VRAM tiers differ in the
//! mover alone.

use std::sync::Arc;
use std::time::Duration;

use super::acquisition::{Access, Acquisition, LayerPart};
use super::counters::Counters;
use super::layout::place::LayerExperts;
use super::policy_driver::{PolicyDriver, PredictedLayers, Timer};
use super::tier::link_price::LinkPrice;
use super::tier::{Fault, Layout, Stop, Tier, TierPlan};
use crate::policy::{Event, Expert, Policy, PolicySpec, Profile, Schedule, Wants};
use crate::{Error, Result};

/// Brings granules into a tier's slots, on threads of its own that take reads from the tier until
/// it is closed. Dropping it waits for them.
pub trait Mover: Send + Sync + 'static {
    /// The profile's section with the link's price of prefetch.
    fn price_section(&self) -> &'static str;

    fn tier(&self) -> &Tier;

    /// Wakes threads that sleep outside of the tier. Takes no lock: the tier's may be held.
    fn wake(&self) {}

    /// Wakes those threads if a read can start, after a change of the tier's state.
    fn wake_if_startable(&self) {}

    /// Whether the tier may hold an expert of its layers.
    fn may_hold(&self, _expert: Expert) -> bool {
        true
    }

    /// The error of a failed load for the layer loop.
    fn load_error(&self, fault: Fault) -> Error {
        Error::Load(fault.0.to_string())
    }
}

/// A tier as its policy's events and reports see it.
pub trait PolicyClient: Send + Sync {
    /// Tells the policy what happened. Events of layers without experts here are left out.
    fn observe(&self, event: &Event) {
        self.observe_by_eviction(event);
        self.observe_by_predictor(event);
    }

    /// Tells the eviction alone.
    fn observe_by_eviction(&self, event: &Event);

    /// Tells the rest of the policy.
    fn observe_by_predictor(&self, event: &Event);

    /// The parts of the next event that the policy wants. Nothing once every expert is in memory.
    fn wants(&self) -> Wants;

    /// The next layer with experts here, after the last one the next token's first.
    fn next_layer(&self, layer: usize) -> usize;

    /// The decision of the policy, with its reason.
    fn verdict(&self) -> Option<String>;

    /// The decision as of now, or `None` while the policy is at work.
    fn verdict_if_free(&self) -> Option<String>;

    /// Puts the policy's profile into `profile`.
    fn save(&self, profile: &mut Profile);

    fn counters(&self) -> Counters;

    /// Whether a read is on its way.
    fn is_reading(&self) -> bool;

    /// Panics if an invariant is broken; returns whether nothing is pinned or on its way.
    fn check_integrity(&self) -> bool;
}

/// Options of all tiers.
pub struct RuntimeOptions<'a> {
    pub policy: PolicySpec,
    /// Experts that a token uses in a layer.
    pub k: usize,
    /// The profile that policies have learned for the model.
    pub profile: &'a Profile,
    /// Whether `observe` waits until every prefetch has landed, and policies hear of made-up times,
    /// so that hits do not depend on time: for tests.
    pub lockstep: bool,
}

pub struct TierRuntime<M: Mover> {
    /// Declared first so that it is dropped first: its thread uses the mover.
    policy: PolicyDriver,
    pub(super) mover: Arc<M>,
    has_experts: Vec<bool>,
    next_layer: Vec<usize>,
    lockstep: bool,
}

impl<M: Mover> TierRuntime<M> {
    /// Builds the policy and the tier; `open` makes the mover around it. `layers`: `None` where no
    /// experts are to be in this tier.
    pub(super) fn open(
        plan: &TierPlan,
        layout: Box<dyn Layout>,
        layers: &[Option<LayerExperts>],
        options: &RuntimeOptions,
        open: impl FnOnce(Tier) -> Result<M>,
    ) -> Result<TierRuntime<M>> {
        let shape = plan.shape(options.k);
        let Policy { eviction, predictor, splitter, notes } =
            options.policy.build(&shape, options.profile);
        notes.iter().for_each(|note| log::warn!("{note}"));
        let mover = Arc::new(open(Tier::new(plan.clone(), layout, eviction))?);
        // What an idle link brings depends on time, and in lockstep nothing may.
        if !options.lockstep {
            let price = known_price(options.profile, mover.price_section());
            mover.tier().use_idle_link(price);
            mover.wake_if_startable();
        }
        let bytes = |l: &Option<LayerExperts>| l.as_ref().map_or(0, |l| l.expert_bytes() as u64);
        let timer = Timer::new(&layers.iter().map(bytes).collect::<Vec<u64>>());
        let timer = if options.lockstep { timer.in_lockstep() } else { timer };
        // Plans depend on what things take, and in lockstep nothing may.
        let planner = options.policy.prefetch_planner(&shape).filter(|_| !options.lockstep);
        Ok(TierRuntime {
            policy: PolicyDriver::new(mover.clone(), predictor, splitter, planner, timer),
            mover,
            has_experts: layers.iter().map(Option::is_some).collect(),
            next_layer: shape.next_moe_layers(),
            lockstep: options.lockstep,
        })
    }

    pub(super) fn tier(&self) -> &Tier {
        self.mover.tier()
    }

    /// Whether experts of this layer can be here.
    pub fn has(&self, layer: usize) -> bool {
        self.has_experts[layer]
    }

    /// Whether prefetches are waited for; see [`RuntimeOptions`].
    pub(super) fn is_lockstep(&self) -> bool {
        self.lockstep
    }

    /// Waits until everything has landed that can.
    pub(super) fn wait_for_prefetches(&self) {
        self.policy.catch_up();
        while self.tier().is_moving() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    // ---- demand ----

    /// Identifies this tier to acquisitions.
    pub(super) fn owner(&self) -> usize {
        Arc::as_ptr(&self.mover).addr()
    }

    pub(super) fn demand(
        &self,
        layer: usize,
        part: LayerPart<'_>,
        access: Access,
        acquisition: &mut Acquisition,
    ) {
        acquisition.start(self.owner(), layer, part, access);
        self.tier().acquire(acquisition);
        self.mover.wake_if_startable();
    }

    pub(super) fn wait_ready(&self, acquisition: &mut Acquisition) -> Result<bool> {
        acquisition.check_owner(self.owner());
        let cancel = acquisition.cancel.clone();
        let result = loop {
            if self.lockstep {
                self.wait_for_prefetches();
            }
            let result = self.tier().next_ready(acquisition, &|| {
                // Loads that had no slots before may have been queued.
                self.mover.wake();
                self.lockstep || cancel.is_cancelled()
            });
            // In lockstep, all that can land lands before the tier is asked again: which granules
            // are handed out together, and so leave together, must not depend on time.
            if !(self.lockstep && result == Err(Stop::Interrupted) && !cancel.is_cancelled()) {
                break result;
            }
        };
        self.mover.wake_if_startable();
        result.map_err(|stop| match stop {
            Stop::Failed(fault) => self.mover.load_error(fault),
            Stop::Interrupted => Error::Interrupted,
        })
    }

    pub(super) fn end_demand(&self, acquisition: &mut Acquisition) {
        acquisition.check_owner(self.owner());
        self.tier().release(acquisition);
        // Prefetches may have waited for the loads that end here.
        self.mover.wake_if_startable();
    }

    // ---- placement across layers ----

    /// See `PolicyDriver::predicted`.
    pub fn predicted(&self, layer: usize, out: &mut PredictedLayers) {
        self.policy.predicted(layer, out);
    }

    /// See `PolicyDriver::prefetch_planned`.
    pub fn prefetch_planned(&self, layer: usize, schedule: &Schedule) {
        self.policy.prefetch_planned(layer, schedule);
    }

    /// See `PolicyDriver::set_attention_ns`.
    pub fn set_attention_ns(&self, ns: f64) {
        self.policy.set_attention_ns(ns);
    }

    // ---- whole-layer prefetch ----

    /// Queues a layer's experts behind the demand of the layer that is acquired. Called for a
    /// prompt that will use nearly all of them next; replaces the layer prefetch before it.
    pub fn prefetch_layer(&self, layer: usize) {
        let id = |expert| Expert { layer: layer as u32, expert };
        self.tier().prefetch_layer(layer, &|expert| self.mover.may_hold(id(expert)));
        self.mover.wake_if_startable();
    }

    /// Gives the layer prefetch up, if there is one.
    pub fn cancel_layer_prefetch(&self) {
        self.tier().cancel_layer_prefetch();
        self.mover.wake_if_startable();
    }
}

/// The price of prefetch in a profile.
fn known_price(profile: &Profile, section: &str) -> Option<f64> {
    let price = LinkPrice::restore(profile.get(section)?);
    price.inspect_err(|why| log::warn!("the profile's {section} is not used: {why}")).ok()
}

impl<M: Mover> PolicyClient for TierRuntime<M> {
    fn observe_by_eviction(&self, event: &Event) {
        if let Some(event) = event.of_layers(&|layer| self.has(layer as usize)) {
            self.tier().observe(&event);
        }
    }

    fn observe_by_predictor(&self, event: &Event) {
        let Some(event) = event.of_layers(&|layer| self.has(layer as usize)) else { return };
        // With every expert in memory there is nothing left to prefetch.
        if self.tier().has_everything() {
            return;
        }
        if self.lockstep {
            self.policy.observe(&event.in_lockstep());
            self.wait_for_prefetches();
        } else {
            self.policy.observe(&event);
        }
    }

    fn wants(&self) -> Wants {
        let wants = self.policy.wants();
        let has_reader = wants != Wants::default() && !self.tier().has_everything();
        if has_reader { wants } else { Wants::default() }
    }

    fn next_layer(&self, layer: usize) -> usize {
        self.next_layer[layer]
    }

    fn verdict(&self) -> Option<String> {
        self.policy.verdict()
    }

    fn verdict_if_free(&self) -> Option<String> {
        self.policy.verdict_if_free()
    }

    fn save(&self, profile: &mut Profile) {
        self.tier().save(profile);
        self.policy.save(profile);
        // Alone it is of no use.
        if let Some(price) = self.tier().encode_price().filter(|_| !profile.is_empty()) {
            profile.set(self.mover.price_section(), price);
        }
    }

    fn counters(&self) -> Counters {
        let mut counters = self.tier().counters();
        self.policy.count(&mut counters);
        counters
    }

    fn is_reading(&self) -> bool {
        self.tier().is_reading()
    }

    fn check_integrity(&self) -> bool {
        self.tier().check_integrity()
    }
}

impl<M: Mover> Drop for TierRuntime<M> {
    fn drop(&mut self) {
        // The mover's threads end when they see it; dropping the mover then waits for them.
        self.tier().close();
        self.mover.wake();
    }
}
