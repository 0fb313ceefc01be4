//! The stored maps that a trajectory is compared with. To compare a thousand maps in each of 48
//! layers would take longer than all else that a policy does, and the nearest one is always among
//! those that were near before: so the farther half is left out again and again. In replays of the
//! demo model, of 12 layers, hits differ by less than 0.1 points.

use super::row::Query;
use super::store::Rows;

/// So many are never left out.
const LEAST: usize = 64;

/// A map's sums over the layers that were seen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub dot: f32,
    /// Squared norm.
    pub norm2: f32,
}

impl Sums {
    /// The cosine similarity to a trajectory of this squared norm; 0 where either has none.
    fn score(&self, norm2: f32) -> f32 {
        let product = self.norm2 * norm2;
        if product > 0.0 { self.dot / product.sqrt() } else { 0.0 }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Compared {
    /// Places in the store, ascending.
    indices: Vec<u32>,
    sums: Vec<Sums>,
    /// Room for scores.
    scores: Vec<f32>,
}

impl Compared {
    /// With all `n` maps, and nothing seen.
    pub fn restart(&mut self, n: usize) {
        self.indices.clear();
        self.indices.extend(0..n as u32);
        self.sums.clear();
        self.sums.resize(n, Sums::default());
    }

    pub fn indices(&self) -> &[u32] {
        &self.indices
    }

    pub fn add_layer(&mut self, rows: &Rows, query: &Query) {
        for (index, sums) in self.indices.iter().zip(&mut self.sums) {
            let (head, ids, levels) = rows.row(*index as usize);
            sums.dot += query.dot(head, ids, levels);
            sums.norm2 += head.norm2;
        }
    }

    /// Replaces `out` by each map's score.
    pub fn scores(&self, norm2: f32, out: &mut Vec<f32>) {
        out.clear();
        out.extend(self.sums.iter().map(|sums| sums.score(norm2)));
    }

    /// Leaves out the farther half, but at most so many that `LEAST` stay.
    pub fn halve(&mut self, norm2: f32) {
        let n = (self.indices.len() / 2).max(LEAST);
        if n >= self.indices.len() {
            return;
        }
        let mut scores = std::mem::take(&mut self.scores);
        self.scores(norm2, &mut scores);
        let (nearer, limit, _) = scores.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a));
        // Of those with the very score of the last that stays, the first ones stay.
        let limit = *limit;
        let mut n_equal = 1 + nearer.iter().filter(|score| **score == limit).count();
        let mut kept = 0;
        for at in 0..self.indices.len() {
            let score = self.sums[at].score(norm2);
            if score > limit || score == limit && n_equal > 0 {
                n_equal -= usize::from(score == limit);
                (self.indices[kept], self.sums[kept]) = (self.indices[at], self.sums[at]);
                kept += 1;
            }
        }
        self.indices.truncate(kept);
        self.sums.truncate(kept);
        self.scores = scores;
    }

    /// Another map has come to this place of the store: its sums, at 0, if it is compared. One in a
    /// new place is, unless others have been left out.
    pub fn reset(&mut self, index: usize, is_new: bool) -> Option<&mut Sums> {
        if is_new && index == self.indices.len() {
            self.indices.push(index as u32);
            self.sums.push(Sums::default());
        }
        let at = self.indices.binary_search(&(index as u32)).ok()?;
        self.sums[at] = Sums::default();
        Some(&mut self.sums[at])
    }
}
