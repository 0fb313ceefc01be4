//! A bias on attention scores that depends on the distance between query and key.

/// One number per head and distance. A distance beyond `reach` counts as `reach`.
#[derive(Clone, Debug)]
pub struct DistanceBias {
    reach: usize,
    /// [n_head, 2·reach + 1], from the farthest key before the query to the farthest after it
    values: Vec<f32>,
}

impl DistanceBias {
    /// Calls `of(head, distance)` for distances (key minus query) from −reach to reach.
    pub fn new(n_head: usize, reach: usize, of: impl Fn(usize, isize) -> f32) -> DistanceBias {
        let distances = || -(reach as isize)..=reach as isize;
        let head = |h: usize| distances().map(|d| of(h, d)).collect::<Vec<f32>>();
        DistanceBias { reach, values: (0..n_head).flat_map(head).collect() }
    }

    pub fn reach(&self) -> usize {
        self.reach
    }

    /// f32 [n_head, 2·reach + 1]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The bias of a head for these positions.
    pub fn at(&self, head: usize, key: usize, query: usize) -> f32 {
        let (first, last) = (query.saturating_sub(self.reach), query + self.reach);
        let key = key.clamp(first, last);
        self.values[head * (2 * self.reach + 1) + key + self.reach - query]
    }
}
