//! How far ahead to prefetch (§6.7): too near, and loads are not hidden; too far, and predictions
//! are wrong. The paper profiles each model before it serves it; this does it from a recording. The
//! distance is kept in the model's profile: version and d, u32 each, little-endian.

use super::predictor::FineMoeOptions;
use super::search::{Match, Trajectory};
use super::select::{select, threshold};
use super::similarity::{Iteration, top_k};
use super::store::MapStore;
use crate::policy::{Costs, Profile, Shape};

const VERSION: u32 = 1;

/// Quality of a prefetch distance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AtDistance {
    pub distance: usize,
    /// The share of used experts that was predicted.
    pub hit_rate: f64,
    /// Experts that were predicted, a layer.
    pub n_predicted: f64,
    /// Waiting to expect, ns a layer.
    pub stall_ns: f64,
}

/// Evaluates the distances from 1 to `max_distance`, in this order. Each iteration is searched for
/// among those before it; the cost assumes that a share `absent` of the experts is not in memory.
/// `options.distance` is used only by the store, when it is full. An iteration that lacks layers is
/// predicted as far as it goes, and not stored.
pub fn profile_distances(
    shape: &Shape,
    options: FineMoeOptions,
    iterations: &[Iteration],
    costs: &Costs,
    absent: f64,
    max_distance: usize,
) -> Vec<AtDistance> {
    let mut tallies = vec![Tally::default(); max_distance.min(shape.moe_layers().count())];
    let mut store = MapStore::new(shape, options.capacity, options.distance);
    let mut trajectory = Trajectory::new(&store);
    for iteration in iterations {
        let actual: Vec<_> = iteration.map.iter().map(|probs| top_k(probs, shape.k)).collect();
        let mut judge = |found: Option<Match>, target: usize, distance: usize| {
            let (Some(found), Some(actual)) = (found, actual.get(target)) else { return };
            let delta = if options.use_delta { threshold(found.score) } else { 0.0 };
            let mut picks = Vec::new();
            select(store.ranked(found.index, target), delta, f32::INFINITY, shape.k, &mut picks);
            tallies[distance - 1].add(&picks, actual);
        };
        let n_distances = max_distance.min(actual.len());
        let semantic = options.use_semantic.then(|| store.nearest(&iteration.embedding)).flatten();
        for distance in 1..=n_distances {
            (0..distance).for_each(|target| judge(semantic, target, distance));
        }
        trajectory.restart(&store);
        for (ordinal, (layer, probs)) in shape.moe_layers().zip(&iteration.map).enumerate() {
            trajectory.push(&store, layer as u32, probs);
            let found = trajectory.best();
            (1..=n_distances).for_each(|distance| judge(found, ordinal + distance, distance));
        }
        if trajectory.is_complete() {
            store.insert(&iteration.embedding, &trajectory);
        }
    }
    let n_layers = iterations.iter().map(|iteration| iteration.map.len()).sum::<usize>() as f64;
    let n_used = n_layers * shape.k as f64;
    let tallies = (1..).zip(&tallies);
    tallies
        .map(|(distance, tally)| {
            let hit_rate = tally.n_hits as f64 / n_used.max(1.0);
            let n_predicted = tally.n_predicted as f64 / n_layers.max(1.0);
            let at = AtDistance { distance, hit_rate, n_predicted, stall_ns: 0.0 };
            AtDistance { stall_ns: stall_ns(&at, shape.k, costs, absent), ..at }
        })
        .collect()
}

/// The distance with the least stall, of equals the nearest. `None` if there are none.
pub fn best_distance(profile: &[AtDistance]) -> Option<usize> {
    let best = profile.iter().min_by(|a, b| a.stall_ns.total_cmp(&b.stall_ns));
    best.map(|at| at.distance)
}

/// The profile's section with the distance.
pub const DISTANCE_SECTION: &str = "finemoe.distance";

pub fn save_distance(distance: usize, profile: &mut Profile) {
    let numbers = [VERSION, distance as u32];
    profile.set(DISTANCE_SECTION, numbers.iter().flat_map(|n| n.to_le_bytes()).collect());
}

/// Restores the distance that was saved for a model of this shape. Returns the reason as a clause,
/// for use after a colon.
pub fn restore_distance(shape: &Shape, bytes: &[u8]) -> Result<usize, String> {
    let (numbers, rest) = bytes.as_chunks();
    let numbers: Vec<u32> = numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let ([version, distance], []) = (&numbers[..], rest) else {
        return Err(format!("it has {} bytes, expected 8", bytes.len()));
    };
    if *version != VERSION {
        return Err(format!("it has version {version}, this moeba reads version {VERSION}"));
    }
    let (distance, n_layers) = (*distance as usize, shape.moe_layers().count());
    if !(1..=n_layers).contains(&distance) {
        return Err(format!("a prefetch distance of {distance} does not fit {n_layers} layers"));
    }
    Ok(distance)
}

/// A missed expert is waited for while it is loaded. Predicted ones are loaded one after another: a
/// layer's within the time of d layers, and also within that of one, as the next layer's follow.
/// The excess over either is waited for. A mean below one load means one load now and then.
fn stall_ns(at: &AtDistance, k: usize, costs: &Costs, absent: f64) -> f64 {
    let layer_ns = costs.attention_ns + costs.experts_ns;
    let missed = k as f64 * (1.0 - at.hit_rate) * absent;
    let prefetched = at.n_predicted * absent;
    let late = prefetched.max(1.0) * costs.load_ns - at.distance as f64 * layer_ns;
    let too_many = prefetched * costs.load_ns - layer_ns;
    missed * costs.load_ns + (late.max(0.0) * prefetched.min(1.0)).max(too_many)
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    n_hits: usize,
    n_predicted: usize,
}

impl Tally {
    fn add(&mut self, picks: &[(u32, f32)], actual: &[u32]) {
        self.n_predicted += picks.len();
        let is_hit = |expert: &&u32| picks.iter().any(|(picked, _)| picked == *expert);
        self.n_hits += actual.iter().filter(is_hit).count();
    }
}
