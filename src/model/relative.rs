//! T5's relative positions (Raffel et al. 2020, section 2.1): distances fall into buckets, near
//! ones into one each, farther ones into wider and wider ones up to a largest distance. A table
//! has a number for each bucket and head; all layers of a stack use its first layer's.

use crate::backend::ops::DistanceBias;

/// Buckets and the distance from which on the last of them counts.
#[derive(Clone, Copy, Debug)]
pub struct Buckets {
    pub n: usize,
    pub max_distance: usize,
}

impl Buckets {
    /// The bucket of a distance, key minus query. An encoder's have halves for keys before and
    /// behind the query, a decoder's none for those behind. In f32 as the reference computes it:
    /// a distance on the edge between two buckets depends on it.
    fn of(self, distance: isize, both_sides: bool) -> usize {
        let (n, first) = match both_sides {
            true => (self.n / 2, if distance > 0 { self.n / 2 } else { 0 }),
            false => (self.n, 0),
        };
        let d = if both_sides || distance < 0 { distance.unsigned_abs() } else { 0 };
        let exact = n / 2;
        if d < exact {
            return first + d;
        }
        let ratio = (self.max_distance as f64 / exact as f64).ln() as f32;
        let wide = (d as f32 / exact as f32).ln() / ratio * (n - exact) as f32;
        first + (exact + wide as usize).min(n - 1)
    }

    /// The attention bias of a table [buckets, n_head].
    pub fn bias(self, table: &[f32], both_sides: bool) -> DistanceBias {
        let n_head = table.len() / self.n;
        let of = |head: usize, d: isize| table[self.of(d, both_sides) * n_head + head];
        DistanceBias::new(n_head, self.max_distance, of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Run lengths of buckets for distances 0, −1, −2 …: what
    /// `SwitchTransformersAttention._relative_position_bucket` of transformers 5.23 gives.
    fn runs(n: usize, max_distance: usize, both_sides: bool) -> Vec<usize> {
        let buckets = Buckets { n, max_distance };
        let all: Vec<usize> = (0..200).map(|d: isize| buckets.of(-d, both_sides)).collect();
        let runs = all.chunk_by(|a, b| a == b);
        assert!(all.windows(2).all(|w| w[1] == w[0] || w[1] == w[0] + 1));
        runs.map(<[usize]>::len).collect()
    }

    #[test]
    fn distances_fall_into_the_reference_s_buckets() {
        let ones = |n: usize, rest: &[usize]| [vec![1; n], rest.to_vec()].concat();
        assert_eq!(runs(32, 128, true), ones(8, &[4, 4, 7, 9, 14, 18, 27, 109]));
        let rest = [3, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 10, 10, 12, 14, 87];
        assert_eq!(runs(32, 128, false), ones(16, &rest));
        assert_eq!(runs(16, 48, true), ones(4, &[4, 6, 12, 174]));
        assert_eq!(runs(16, 48, false), ones(8, &[3, 2, 3, 4, 5, 6, 8, 161]));
        let rest = [4, 3, 4, 5, 7, 7, 8, 10, 13, 14, 17, 20, 25, 29, 18];
        assert_eq!(runs(64, 256, true), ones(16, &rest));
    }

    #[test]
    fn sides_differ_and_far_is_all_one() {
        let buckets = Buckets { n: 32, max_distance: 128 };
        assert_eq!((buckets.of(5, true), buckets.of(-5, true)), (21, 5));
        assert_eq!((buckets.of(5, false), buckets.of(-5, false)), (0, 5));
        for (both_sides, last) in [(true, 15), (false, 31)] {
            assert_eq!(buckets.of(-128, both_sides), last);
            assert_eq!(buckets.of(-100_000, both_sides), last);
        }
    }
}
