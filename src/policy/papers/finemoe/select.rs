//! Which experts of a searched layer to prefetch (§4.3).

/// An expert of a layer and its probability there.
pub(super) type Pick = (u32, f32);

/// δ = clip(1 − score, 0, 1): the less similar the map, the more of its probability is wanted.
pub(super) fn threshold(score: f32) -> f32 {
    (1.0 - score).clamp(0.0, 1.0)
}

/// Replaces `picks` by the fewest experts that have at least the probability `threshold` together,
/// but no fewer than `k` if there are as many (Eqs. 6 to 8). `ranked`: most probable first.
pub(super) fn select(
    ranked: impl Iterator<Item = Pick>,
    threshold: f32,
    k: usize,
    picks: &mut Vec<Pick>,
) {
    picks.clear();
    let mut sum = 0.0;
    for (expert, p) in ranked {
        if picks.len() >= k && sum >= threshold {
            break;
        }
        picks.push((expert, p));
        sum += p;
    }
}
