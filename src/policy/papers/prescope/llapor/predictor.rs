//! The networks at work: a layer's networks are asked as soon as the routers before it have chosen,
//! and learn from what its own router chooses then.

use super::loss::sigmoid;
use super::model::{LayerModel, LlaporModel, Workspace};
use crate::policy::{Event, Expert, Phase, Prediction, Predictor, Profile, Routed, Shape, Wants};

/// η of online updates.
const RATE: f32 = 0.1;

/// Beyond the k most probable experts those are predicted that are used rather than not.
const THRESHOLD: f32 = 0.5;

/// The worth of a prediction two layers ahead, in parts of one for the next layer: all that is
/// predicted for the next layer comes first.
const SECOND_WEIGHT: f32 = 1e-3;

/// Timelines that are followed at once. Beyond, the one that was quiet for longest is forgotten.
const MAX_TIMELINES: usize = 64;

/// A core does some thousand of a network's products in a microsecond. More than so many are slow.
const MAX_PRODUCTS: usize = 64 << 10;

pub struct LlaPor {
    model: LlaporModel,
    /// The MoE layer after each MoE layer; after the last, the first.
    next: Vec<u32>,
    first: u32,
    n_moe: usize,
    k: usize,
    /// Whether it learns.
    online: bool,
    timelines: Vec<Timeline>,
    /// Timelines that have ended, for their memory.
    spare: Vec<Timeline>,
    /// Routers heard of.
    clock: u64,
    /// The layer that the last event was a look ahead at, and the probabilities of its experts.
    last_predicted: Option<u32>,
    probs: Vec<f32>,
    /// Room for the predictions of all timelines.
    merged: Vec<(Expert, f32)>,
}

/// A request whose next layer has been predicted.
#[derive(Default)]
struct Timeline {
    request: u32,
    /// When that was.
    clock: u64,
    next: Ahead,
    /// The layer behind it, and the next one as it was predicted a layer before: to learn from.
    second: Ahead,
    was_second: Ahead,
}

/// A layer that is predicted.
#[derive(Default)]
struct Ahead {
    /// None until there is a prediction.
    target: Option<u32>,
    /// Output of the target's network.
    work: Workspace,
    /// The experts that are predicted and their probabilities.
    best: Vec<(u32, f32)>,
}

impl LlaPor {
    /// The profile's section with the networks.
    pub const SECTION: &str = "prescope.llapor";

    /// Returns the reason as a clause, for use after a colon, if the model does not fit the shape.
    pub fn new(shape: &Shape, model: LlaporModel, online: bool) -> Result<LlaPor, String> {
        model.check(shape)?;
        let moe: Vec<usize> = shape.moe_layers().collect();
        let mut next = vec![0; shape.n_layers()];
        for (i, &layer) in moe.iter().enumerate() {
            next[layer] = moe[(i + 1) % moe.len()] as u32;
        }
        Ok(LlaPor {
            model,
            next,
            first: moe.first().map_or(0, |layer| *layer as u32),
            n_moe: moe.len(),
            k: shape.k,
            online,
            timelines: Vec::new(),
            spare: Vec::new(),
            clock: 0,
            last_predicted: None,
            probs: Vec::new(),
            merged: Vec::new(),
        })
    }

    /// The predictor as it was trained, with what it has learned since. The error is a sentence.
    pub fn from_profile(shape: &Shape, profile: &Profile, online: bool) -> Result<LlaPor, String> {
        let Some(bytes) = profile.get(Self::SECTION) else {
            return Err("LLaPor cannot predict before it is trained: record a routing trace of \
                        this model and give it to `moeba trace train`"
                .into());
        };
        let refused = |why| format!("the profile's LLaPor cannot be used, as {why}");
        let model = LlaporModel::decode(shape, bytes).map_err(refused)?;
        LlaPor::new(shape, model, online).map_err(refused)
    }

    /// The model by now, with what it has learned.
    pub fn model(&self) -> &LlaporModel {
        &self.model
    }

    fn position(&self, request: u32) -> Option<usize> {
        self.timelines.iter().position(|timeline| timeline.request == request)
    }

    fn forget(&mut self, request: u32) {
        if let Some(at) = self.position(request) {
            let mut timeline = self.timelines.swap_remove(at);
            timeline.forget();
            self.spare.push(timeline);
        }
    }

    fn routed(&mut self, event: &Routed<'_>) {
        self.clock += 1;
        if self.online {
            self.learn(event);
        }
        let next = |layer: u32| self.next.get(layer as usize).copied().unwrap_or_default();
        let (target, second) = (next(event.layer), next(next(event.layer)));
        let mut timeline = match self.position(event.request) {
            Some(at) => self.timelines.swap_remove(at),
            None => self.spare.pop().unwrap_or_default(),
        };
        std::mem::swap(&mut timeline.second, &mut timeline.was_second);
        if timeline.next.predict(&self.model.layers, target, event, self.k) {
            timeline.second.predict(&self.model.second, second, event, self.k);
            (timeline.request, timeline.clock) = (event.request, self.clock);
            self.last_predicted = Some(target);
            self.probs.clear();
            self.probs.extend(timeline.next.work.logits.iter().map(|x| sigmoid(*x)));
            self.make_room();
            self.timelines.push(timeline);
        } else {
            timeline.forget();
            self.spare.push(timeline);
        }
    }

    fn make_room(&mut self) {
        if self.timelines.len() == MAX_TIMELINES {
            let oldest = self.timelines.iter().min_by_key(|timeline| timeline.clock);
            self.forget(oldest.expect("there are some").request);
        }
    }

    /// If that layer was predicted, its networks now learn the right choices.
    fn learn(&mut self, event: &Routed<'_>) {
        let Some(at) = self.position(event.request) else { return };
        let Timeline { next, was_second, .. } = &self.timelines[at];
        let LlaporModel { layers, second } = &mut self.model;
        for (ahead, layers) in [(next, layers), (was_second, second)] {
            if ahead.target == Some(event.layer) {
                let model = layers[event.layer as usize].as_mut();
                model.expect("it has predicted").learn(&ahead.work, event.chosen, RATE);
            }
        }
    }
}

impl Timeline {
    fn forget(&mut self) {
        for ahead in [&mut self.next, &mut self.second, &mut self.was_second] {
            ahead.target = None;
        }
    }
}

impl Ahead {
    /// Whether there is a network and the event is such that it can say something.
    fn predict(
        &mut self,
        layers: &[Option<LayerModel>],
        target: u32,
        event: &Routed<'_>,
        k: usize,
    ) -> bool {
        let model = layers.get(target as usize).and_then(Option::as_ref);
        self.target = model.filter(|model| self.ask(model, event, k)).map(|_| target);
        self.target.is_some()
    }

    fn ask(&mut self, model: &LayerModel, event: &Routed<'_>, k: usize) -> bool {
        let fits = event.hidden.len() == model.n_embd()
            && event.probs.len() == model.n_source()
            && event.chosen.iter().all(|expert| (*expert as usize) < model.n_source());
        if !fits {
            return false;
        }
        model.forward(event.hidden, event.chosen, event.probs, &mut self.work);
        if !self.work.logits.iter().all(|x| x.is_finite()) {
            return false;
        }
        self.best.clear();
        self.best.extend((0..).zip(self.work.logits.iter().map(|x| sigmoid(*x))));
        descending(&mut self.best);
        let likely = self.best.iter().take_while(|(_, p)| *p > THRESHOLD).count();
        self.best.truncate(likely.clamp(k, 2 * k));
        true
    }
}

/// By probability; of equals the lower id first.
fn descending<T: Copy + Ord>(list: &mut [(T, f32)]) {
    list.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
}

impl Predictor for LlaPor {
    fn observe(&mut self, event: &Event<'_>) {
        self.last_predicted = None;
        match event {
            Event::Routed(event) => self.routed(event),
            Event::IterationStart { request, phase, .. } => {
                // Only the next token's first layer may have been predicted before it begins.
                let first = Some(self.first).filter(|_| *phase == Phase::Decode);
                let at = self.position(*request);
                if at.is_some_and(|at| first.is_none() || self.timelines[at].next.target != first) {
                    self.forget(*request);
                }
            }
            Event::RequestStart { request } | Event::RequestEnd { request } => {
                self.forget(*request);
            }
            Event::PromptRouted(_)
            | Event::NextToken { .. }
            | Event::Predicted { .. }
            | Event::Expected { .. }
            | Event::IterationEnd { .. } => {}
        }
    }

    /// Predicts for all active requests, whether they take turns by layer or by token; a request
    /// without an event for a whole round is paused. The priority is the probability that any of
    /// them uses the expert.
    fn predict(&mut self, out: &mut Vec<Prediction>) {
        let round = (self.n_moe * self.timelines.len()) as u64;
        self.merged.clear();
        for timeline in self.timelines.iter().filter(|t| self.clock - t.clock <= round) {
            for (ahead, weight) in [(&timeline.next, 1.0), (&timeline.second, SECOND_WEIGHT)] {
                let Some(layer) = ahead.target else { continue };
                let best = ahead.best.iter();
                self.merged.extend(best.map(|&(expert, p)| (Expert { layer, expert }, weight * p)));
            }
        }
        self.merged.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        self.merged.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            if same {
                kept.1 = 1.0 - (1.0 - kept.1) * (1.0 - next.1);
            }
            same
        });
        descending(&mut self.merged);
        out.clear();
        out.extend(self.merged.iter().map(|&(expert, priority)| Prediction { expert, priority }));
    }

    fn wants(&self) -> Wants {
        Wants { hidden: true, ..Wants::default() }
    }

    fn is_slow(&self) -> bool {
        let LlaporModel { layers, second } = &self.model;
        let most = |layers: &[Option<LayerModel>]| {
            layers.iter().flatten().map(LayerModel::n_products).max().unwrap_or_default()
        };
        most(layers) + most(second) > MAX_PRODUCTS
    }

    fn emit(&self, listener: &mut dyn FnMut(&Event<'_>)) {
        if let Some(layer) = self.last_predicted {
            listener(&Event::Predicted { layer, probs: &self.probs });
        }
    }

    fn save(&self, profile: &mut Profile) {
        profile.set(Self::SECTION, self.model.encode());
    }
}
