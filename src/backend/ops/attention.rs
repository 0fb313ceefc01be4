//! A bias on attention scores that depends on the distance between query and key.

/// One number per head and distance. A distance beyond `reach` counts as `reach`.
#[derive(Clone, Debug)]
pub struct DistanceBias {
    reach: usize,
    /// [n_head, 2·reach + 1], from the farthest key before the query to the farthest after it
    values: Vec<f32>,
    /// [n_head], or empty: factors on the distance, however far it is.
    slopes: Vec<f32>,
}

impl DistanceBias {
    /// Calls `of(head, distance)` for distances (key minus query) from −reach to reach.
    pub fn new(n_head: usize, reach: usize, of: impl Fn(usize, isize) -> f32) -> DistanceBias {
        let distances = || -(reach as isize)..=reach as isize;
        let head = |h: usize| distances().map(|d| of(h, d)).collect::<Vec<f32>>();
        let values = (0..n_head).flat_map(head).collect();
        DistanceBias { reach, values, slopes: Vec::new() }
    }

    /// Scores that fall with the distance (ALiBi, arXiv 2108.12409): the slopes of heads are
    /// powers of one number, from 2^(−8/n) on for n heads, those of heads beyond a power of two
    /// odd powers of its root.
    pub fn alibi(n_head: usize) -> DistanceBias {
        let n_whole = 1usize << n_head.max(1).ilog2();
        let slope = |h: usize| match h < n_whole {
            true => (-8.0 / n_whole as f32).exp2().powi(h as i32 + 1),
            false => (-4.0 / n_whole as f32).exp2().powi(2 * (h - n_whole) as i32 + 1),
        };
        let slopes = (0..n_head).map(|h| -slope(h)).collect();
        DistanceBias { reach: 0, values: Vec::new(), slopes }
    }

    pub fn reach(&self) -> usize {
        self.reach
    }

    /// f32 [n_head, 2·reach + 1]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Factors on the distance, f32 `[n_head]`; empty where it has values.
    pub fn slopes(&self) -> &[f32] {
        &self.slopes
    }

    /// The bias of a head for these positions.
    pub fn at(&self, head: usize, key: usize, query: usize) -> f32 {
        if let Some(slope) = self.slopes.get(head) {
            return slope * key.abs_diff(query) as f32;
        }
        let (first, last) = (query.saturating_sub(self.reach), query + self.reach);
        let key = key.clamp(first, last);
        self.values[head * (2 * self.reach + 1) + key + self.reach - query]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_powers_and_far_is_as_near() {
        let bias = DistanceBias::alibi(4);
        let slopes: Vec<f32> = (0..4).map(|head| bias.at(head, 9, 10)).collect();
        assert_eq!(slopes, [-0.25, -0.0625, -0.015625, -0.00390625]);
        assert_eq!(bias.at(1, 0, 100_000), -6250.0);
        assert_eq!(bias.at(2, 7, 7), 0.0);
        // Two heads more than a power of two: 2^-1 and 2^-3.
        let bias = DistanceBias::alibi(6);
        assert_eq!((bias.at(4, 0, 1), bias.at(5, 0, 1)), (-0.5, -0.125));
    }
}
