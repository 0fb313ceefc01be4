//! Keys and values of some positions, to keep elsewhere and to copy between caches.

use super::{KvCache, LayerCache, LayerShape, Plane};
use crate::backend::ops::row_bytes;
use std::ops::Range;

impl KvCache {
    /// Bytes of the keys and values of `n` positions.
    pub fn bytes_of(&self, n: usize) -> usize {
        let layer = |layer: &LayerCache| {
            planes(layer).map(|(plane, heads, dim)| n * heads * row_bytes(plane.ty, dim)).sum()
        };
        self.layers.iter().map(|l| -> usize { layer(l) }).sum()
    }

    /// The keys and values of some positions: by layer and head, keys before values.
    pub fn save(&self, positions: &Range<usize>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes_of(positions.len()));
        for layer in &self.layers {
            for (plane, heads, dim) in planes(layer) {
                for head in 0..heads {
                    let range = range(plane, dim, self.n_ctx, head, positions);
                    bytes.extend_from_slice(&plane.data[range]);
                }
            }
        }
        bytes
    }

    /// Puts back what [`KvCache::save`] gave for as many positions of a cache with the same layers
    /// and types.
    pub fn restore(&mut self, positions: &Range<usize>, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes_of(positions.len()));
        let mut rest = bytes;
        let n_ctx = self.n_ctx;
        self.layers.iter_mut().flat_map(planes_mut).for_each(|(plane, heads, dim)| {
            for head in 0..heads {
                let range = range(plane, dim, n_ctx, head, positions);
                let (part, more) = rest.split_at(range.len());
                plane.data[range].copy_from_slice(part);
                rest = more;
            }
        });
    }

    /// Gives the memory of positions from `n` on back to the system, as far as they fill pages, if
    /// this is a cache of [`KvCache::in_pages`].
    pub fn give_back(&mut self, n: usize) {
        let n_ctx = self.n_ctx;
        for (plane, heads, dim) in self.layers.iter_mut().flat_map(planes_mut) {
            for head in 0..heads {
                let range = range(plane, dim, n_ctx, head, &(n..n_ctx));
                plane.data.give_back(&range);
            }
        }
    }

    /// Copies positions of a cache with the same layers, types and context.
    pub fn copy_from(&mut self, other: &KvCache, positions: &Range<usize>) {
        assert_eq!(self.n_ctx, other.n_ctx);
        let n_ctx = self.n_ctx;
        for (to, from) in self.layers.iter_mut().zip(&other.layers) {
            for ((to, heads, dim), (from, ..)) in planes_mut(to).zip(planes(from)) {
                for head in 0..heads {
                    let range = range(from, dim, n_ctx, head, positions);
                    to.data[range.clone()].copy_from_slice(&from.data[range]);
                }
            }
        }
    }
}

/// The bytes of a head's rows at some positions.
fn range(
    plane: &Plane,
    dim: usize,
    n_ctx: usize,
    head: usize,
    positions: &Range<usize>,
) -> Range<usize> {
    let row = row_bytes(plane.ty, dim);
    (head * n_ctx + positions.start) * row..(head * n_ctx + positions.end) * row
}

/// Heads and elements of a row, of keys and of values.
fn widths(shape: LayerShape) -> [(usize, usize); 2] {
    match shape {
        LayerShape::Heads { n_head_kv, k_dim, v_dim } => [(n_head_kv, k_dim), (n_head_kv, v_dim)],
        LayerShape::Latent { dim, index, .. } => [(1, dim), (index.min(1), index)],
        LayerShape::State(_) => [(0, 0); 2],
    }
}

/// Keys and values of a layer with their heads and the elements of a row.
fn planes(layer: &LayerCache) -> impl Iterator<Item = (&Plane, usize, usize)> {
    let [k, v] = widths(layer.shape);
    [(&layer.k, k.0, k.1), (&layer.v, v.0, v.1)].into_iter()
}

fn planes_mut(layer: &mut LayerCache) -> impl Iterator<Item = (&mut Plane, usize, usize)> {
    let [k, v] = widths(layer.shape);
    [(&mut layer.k, k.0, k.1), (&mut layer.v, v.0, v.1)].into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::kv::CacheType;

    const N_CTX: usize = 20;

    fn cache(k: CacheType, v: CacheType, seed: u8) -> KvCache {
        let layers = [
            LayerShape::Heads { n_head_kv: 3, k_dim: 64, v_dim: 32 },
            LayerShape::Latent { dim: 96, index: 32, kept: 0 },
        ];
        let mut cache = KvCache::new(&layers, N_CTX, k, v);
        for (plane, ..) in cache.layers.iter_mut().flat_map(planes_mut) {
            let bytes = plane.data.iter_mut().enumerate();
            bytes.for_each(|(i, byte)| *byte = (i as u8).wrapping_mul(31).wrapping_add(seed));
        }
        cache
    }

    /// All bytes of the positions inside and outside of a range.
    fn split(cache: &KvCache, inside: &Range<usize>) -> (Vec<u8>, Vec<u8>) {
        let outside = [cache.save(&(0..inside.start)), cache.save(&(inside.end..N_CTX))];
        (cache.save(inside), outside.concat())
    }

    #[test]
    fn positions_are_moved_and_others_left_alone() {
        for (k, v) in CacheType::ALL.into_iter().zip(CacheType::ALL.into_iter().rev()) {
            let from = cache(k, v, 1);
            for positions in [0..N_CTX, 0..7, 5..6, 13..20, 4..4] {
                let saved = from.save(&positions);
                assert_eq!(saved.len(), from.bytes_of(positions.len()));
                let (mut restored, mut copied) = (cache(k, v, 9), cache(k, v, 9));
                let (_, outside) = split(&restored, &positions);
                restored.restore(&positions, &saved);
                copied.copy_from(&from, &positions);
                let expected = (split(&from, &positions).0, outside);
                assert!(split(&restored, &positions) == expected, "{k} {v} {positions:?}");
                assert!(split(&copied, &positions) == expected, "{k} {v} {positions:?}");
            }
        }
    }

    #[test]
    fn what_is_given_back_is_zero_and_the_rest_is_kept() {
        // Heads of some pages each, and no multiple of one.
        let (n_ctx, kept) = (300, 70);
        let layers = [LayerShape::Heads { n_head_kv: 3, k_dim: 64, v_dim: 32 }];
        for in_pages in [true, false] {
            let (k, v) = (CacheType::F32, CacheType::F16);
            let mut cache = match in_pages {
                true => KvCache::in_pages(&layers, n_ctx, k, v).unwrap(),
                false => KvCache::new(&layers, n_ctx, k, v),
            };
            cache.restore(&(0..n_ctx), &vec![7; cache.bytes_of(n_ctx)]);
            cache.give_back(kept);
            assert!(cache.save(&(0..kept)).iter().all(|byte| *byte == 7));
            let rest = cache.save(&(kept..n_ctx));
            let n_zero = rest.iter().filter(|byte| **byte == 0).count();
            let least = if cfg!(target_os = "linux") && in_pages { rest.len() / 2 } else { 0 };
            assert!(n_zero >= least && (in_pages || n_zero == 0), "{n_zero} of {}", rest.len());
            cache.restore(&(0..n_ctx), &vec![9; cache.bytes_of(n_ctx)]);
            assert!(cache.save(&(0..n_ctx)).iter().all(|byte| *byte == 9));
        }
    }

    #[test]
    fn a_position_moves_in_the_range_that_is_named() {
        let (from, mut to) =
            (cache(CacheType::F16, CacheType::F16, 1), cache(CacheType::F16, CacheType::F16, 9));
        to.restore(&(3..5), &from.save(&(10..12)));
        assert!(to.save(&(3..5)) == from.save(&(10..12)));
    }
}
