//! MoEpic's cache configurator (section 3.4 of its paper): how much of a tier each layer gets, and
//! how much of each cached expert, its top segment, a layer keeps. It counts where in their
//! layer's LCP order the activated and the predicted experts stand (`stats`), makes hit rates and
//! prediction accuracies of all cache sizes from that (`curves`), models the latency that a token
//! is exposed to (`split`, `exposure`) and divides the tier so that it is least (`allocate`).

mod allocate;
mod curves;
mod exposure;
mod order;
mod pending;
mod persist;
mod split;
mod stats;

use crate::policy::registry::{Builder, Names};
use crate::policy::{
    Costs, Event, LayerShare, Phase, PolicySpec, Profile, Shape, SplitKind, Splitter,
};
use exposure::Exposure;
use stats::Stats;

pub(in crate::policy) const NAMES: Names = Names {
    predictors: &[],
    evictions: &[],
    policies: &[(
        "moepic",
        PolicySpec { split: SplitKind::Auto, ..PolicySpec::whole("next-layer", "lcp") },
    )],
};

/// Algorithm 1, or one θ for all layers.
pub(in crate::policy) fn splitter(
    builder: &mut Builder<'_>,
    fixed_theta: Option<f64>,
) -> Box<dyn Splitter> {
    let options = MoepicOptions { fixed_theta, ..MoepicOptions::default() };
    let restored = builder
        .restore(Moepic::SECTION, |shape, bytes| Moepic::restore(shape, options.clone(), bytes));
    Box::new(restored.unwrap_or_else(|| Moepic::new(builder.shape, options)))
}

/// θ before anything is known (Algorithm 1, line 4).
const FIRST_THETA: f64 = 0.5;

#[derive(Clone, Debug, PartialEq)]
pub struct MoepicOptions {
    /// τ: decode tokens from one plan to the next, once there have been some.
    pub tau: u64,
    /// ζ: what moves between layers at a time, as a part of the tier, in (0, 1).
    pub zeta: f64,
    /// Equal shares and one θ in (0, 1] for all layers, ever: no configurator, the split alone.
    pub fixed_theta: Option<f64>,
}

impl MoepicOptions {
    /// The paper has 5,000, more than most processes generate.
    pub const TAU: u64 = 200;

    /// Decode tokens before the first plan from statistics, if τ is not less. From then on they
    /// double from plan to plan, up to τ.
    const FIRST_GAP: u64 = 50;
}

impl Default for MoepicOptions {
    /// ζ is the paper's (section 4.1).
    fn default() -> Self {
        Self { tau: Self::TAU, zeta: 0.01, fixed_theta: None }
    }
}

/// Plans at once when it is asked for the first time: as Algorithm 1 begins, with equal shares and
/// θ = ½, or from restored statistics if they are of enough tokens. Then after 50 decode tokens,
/// after 100 more, and so on up to every τ, from the division that it has to a better one. A plan
/// halves all counts, so that a workload of n plans ago weighs 2⁻ⁿ.
///
/// As θ is a number of granules, ½ is the nearest that there is, and 1 for experts of one granule.
#[derive(Clone, Debug)]
pub struct Moepic {
    shape: Shape,
    options: MoepicOptions,
    stats: Stats,
    /// Decode tokens since the last plan from statistics, and those after which the next one comes.
    tokens: u64,
    gap: u64,
    /// Statistics are an earlier run's, and no plan has been made from them in this one.
    restored: bool,
    /// The plan in force.
    shares: Option<Vec<LayerShare>>,
}

impl Moepic {
    pub fn new(shape: &Shape, options: MoepicOptions) -> Moepic {
        assert!(options.zeta > 0.0 && options.zeta < 1.0, "ζ is a part of the tier");
        assert!(options.fixed_theta.is_none_or(|theta| theta > 0.0 && theta <= 1.0));
        let n = shape.n_layers();
        assert!(shape.n_granules.len() == n && shape.class.len() == n, "a shape without a tier");
        Moepic {
            shape: shape.clone(),
            gap: options.tau.min(MoepicOptions::FIRST_GAP),
            options,
            stats: Stats::new(shape),
            tokens: 0,
            restored: false,
            shares: None,
        }
    }

    /// Exposed loading latency of a token in ns, by the model that plans are made with: Σ T of
    /// Eq. 8. `shares` has all layers.
    pub fn predicted_exposed(&self, shares: &[LayerShare], costs: &Costs) -> f64 {
        Exposure::new(&self.shape, &self.stats, costs).of_shares(shares).iter().sum()
    }

    /// Equal shares, and θ as near as granules come to it, but no less than fills the share: C is
    /// at most N (Eq. 11).
    fn uniform(&self, theta: f64) -> Vec<LayerShare> {
        let n_slots = allocate::uniform(&self.shape);
        let layers = self.shape.n_granules.iter().zip(&self.shape.n_experts).zip(&n_slots);
        let keep = layers.map(|((&n, &n_experts), &n_slots)| {
            let keep = (theta * n as f64).round() as usize;
            keep.max(1).max(n_slots.div_ceil(n_experts.max(1))).min(n)
        });
        let keep: Vec<usize> = keep.collect();
        shares(n_slots, keep)
    }

    /// Whether there is enough to plan from.
    fn has_enough(&self) -> bool {
        // A plan leaves half of what it was made from.
        let warm = self.restored && u64::from(self.stats.tokens()) >= self.gap / 2;
        self.options.fixed_theta.is_none() && (warm || self.tokens >= self.gap)
    }

    /// Algorithm 1's lines 8 to 10.
    fn configure(&mut self, costs: &Costs) -> Vec<LayerShare> {
        let now = match &self.shares {
            Some(shares) => shares.iter().map(|share| share.n_slots).collect(),
            None => allocate::uniform(&self.shape),
        };
        let exposure = Exposure::new(&self.shape, &self.stats, costs);
        let (n_slots, keep) = allocate::allocate(&exposure, &self.shape, self.options.zeta, now);
        self.restored = false;
        if self.tokens >= self.gap {
            self.tokens = 0;
            self.gap = (2 * self.gap).min(self.options.tau);
            self.stats.forget_half();
        }
        shares(n_slots, keep)
    }
}

fn shares(n_slots: Vec<usize>, keep: impl IntoIterator<Item = usize>) -> Vec<LayerShare> {
    let both = n_slots.into_iter().zip(keep);
    both.map(|(n_slots, keep)| LayerShare { n_slots, keep }).collect()
}

/// Whether these are figures to plan with: before the first measurement they are 0.
fn are_measured(costs: &Costs) -> bool {
    let Costs { attention_ns, experts_ns, head_ns, load_ns } = *costs;
    let sane = |ns: f64| ns.is_finite() && ns >= 0.0;
    [attention_ns, experts_ns, head_ns, load_ns].into_iter().all(sane) && load_ns > 0.0
}

impl Splitter for Moepic {
    fn observe(&mut self, event: &Event<'_>) {
        self.stats.observe(event);
        if let Event::IterationEnd { phase: Phase::Decode, .. } = event {
            self.tokens += 1;
        }
    }

    fn is_due(&self) -> bool {
        self.shares.is_none() || self.has_enough()
    }

    fn plan(&mut self, costs: &Costs) -> Option<Vec<LayerShare>> {
        let plan = if self.has_enough() && are_measured(costs) {
            self.configure(costs)
        } else if self.shares.is_none() {
            self.uniform(self.options.fixed_theta.unwrap_or(FIRST_THETA))
        } else {
            return None;
        };
        let is_new = self.shares.as_ref() != Some(&plan);
        is_new.then(|| self.shares.insert(plan).clone())
    }

    fn save(&self, profile: &mut Profile) {
        profile.set(Self::SECTION, persist::encode(&self.stats, self.tokens));
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
