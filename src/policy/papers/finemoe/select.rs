//! Which experts of a searched layer to prefetch (§4.3).

/// An expert of a layer and its probability there.
pub(super) type Pick = (u32, f32);

/// δ = clip(1 − score, 0, 1): the less similar the map, the more of its probability is wanted.
pub(super) fn threshold(score: f32) -> f32 {
    (1.0 - score).clamp(0.0, 1.0)
}

/// The probability above which an expert of a prompt's mean map is used by the prompt rather than
/// not: each of its n tokens uses it with k times its share of the router's probability.
pub(super) fn prompt_floor(n_tokens: u32, k: usize) -> f32 {
    (1.0 - 0.5f32.powf(1.0 / n_tokens.max(1) as f32)) / k.max(1) as f32
}

/// Replaces `picks` by the fewest experts that have at least the probability `threshold` together,
/// but no fewer than `k` if there are as many (Eqs. 6 to 8), and all that have more than `floor`.
/// `ranked`: most probable first.
pub(super) fn select(
    ranked: impl Iterator<Item = Pick>,
    threshold: f32,
    floor: f32,
    k: usize,
    picks: &mut Vec<Pick>,
) {
    picks.clear();
    let mut sum = 0.0;
    for (expert, p) in ranked {
        if picks.len() >= k && sum >= threshold && p <= floor {
            break;
        }
        picks.push((expert, p));
        sum += p;
    }
}
