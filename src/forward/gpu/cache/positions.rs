//! Keys and values of some positions, to keep in host memory and to copy between caches. Their
//! bytes and the order of them are those of `KvCache::save`.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::cache::DeviceRows;
use crate::forward::gpu::cache::GpuCache;
use crate::model::kv::LayerShape;
use std::ops::Range;

/// One head's rows of keys or of values.
struct Head<'a> {
    /// [n_ctx] rows
    all: DeviceSlice<'a>,
    row_bytes: usize,
    /// Bytes of a position that come before this head's.
    before: usize,
}

/// Some of a head's rows in pages: rows are counted from the first page's beginning.
struct InPages {
    rows: Range<usize>,
    row_bytes: usize,
    before: usize,
}

impl InPages {
    /// The pages of `n` positions that the rows are in, and the bytes of each.
    fn places(&self, n: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let InPages { rows, row_bytes, before } = self;
        (rows.start / n..rows.end.div_ceil(n)).map(move |page| {
            let byte = |row: usize| n * before + (row - page * n) * row_bytes;
            (page, byte(rows.start.max(page * n))..byte(rows.end.min((page + 1) * n)))
        })
    }
}

impl GpuCache {
    /// Bytes of the keys and values of `n` positions.
    pub fn bytes_of(&self, n: usize) -> usize {
        n * self.heads().iter().map(|head| head.row_bytes).sum::<usize>()
    }

    /// Copies the keys and values of some positions to pages, each of which gets as many.
    pub fn save(&self, positions: &Range<usize>, pages: &mut [&mut [u8]]) -> Result<()> {
        let n = positions.len() / pages.len();
        let heads = self.heads();
        self.copies.download(self.parts(&heads, positions), |part, mut bytes| {
            for (page, place) in part.places(n) {
                let (of_page, rest) = bytes.split_at(place.len());
                pages[page][place].copy_from_slice(of_page);
                bytes = rest;
            }
        })
    }

    /// Puts back what [`GpuCache::save`] gave for as many positions of a cache with the same layers
    /// and types.
    pub fn restore(&self, positions: &Range<usize>, pages: &[&[u8]]) -> Result<()> {
        let n = positions.len() / pages.len();
        let heads = self.heads();
        self.copies.upload(self.parts(&heads, positions), |part, mut bytes| {
            for (page, place) in part.places(n) {
                let (of_page, rest) = bytes.split_at_mut(place.len());
                of_page.copy_from_slice(&pages[page][place]);
                bytes = rest;
            }
        })
    }

    /// Copies positions of a cache with the same layers, types and context.
    pub fn copy_from(&self, other: &GpuCache, positions: &Range<usize>) -> Result<()> {
        assert_eq!(self.n_ctx, other.n_ctx);
        let stream = self.copies.stream();
        for (to, from) in self.heads().iter().zip(other.heads()) {
            let bytes = positions.start * to.row_bytes..positions.end * to.row_bytes;
            stream.copy(to.all.slice(bytes.clone()), from.all.slice(bytes))?;
        }
        stream.synchronize()
    }

    /// The parts in which positions are copied: as many rows of a head as go at once.
    fn parts<'a>(
        &self,
        heads: &[Head<'a>],
        positions: &Range<usize>,
    ) -> impl Iterator<Item = (DeviceSlice<'a>, InPages)> {
        let (start, n, most_bytes) = (positions.start, positions.len(), self.copies.most_bytes());
        heads.iter().flat_map(move |&Head { all, row_bytes, before }| {
            let most = most_bytes / row_bytes;
            (0..n).step_by(most).map(move |first| {
                let rows = first..n.min(first + most);
                let bytes = (start + rows.start) * row_bytes..(start + rows.end) * row_bytes;
                (all.slice(bytes), InPages { rows, row_bytes, before })
            })
        })
    }

    /// The heads of all layers that keep positions, keys before values.
    fn heads(&self) -> Vec<Head<'_>> {
        let (mut heads, mut before) = (Vec::new(), 0);
        for rows in self.planes() {
            let row_bytes = rows.row_bytes();
            for all in rows.by_head() {
                heads.push(Head { all, row_bytes, before });
                before += row_bytes;
            }
        }
        heads
    }

    fn planes(&self) -> impl Iterator<Item = DeviceRows<'_>> {
        let slots = self.slots.iter().enumerate();
        let with_rows = slots.filter_map(|(slot, ranges)| match ranges.as_ref()?.shape {
            LayerShape::State(_) => None,
            _ => Some(slot),
        });
        with_rows.flat_map(|slot| {
            let (keys, values) = self.of_slot(slot);
            // A layer may have none of one kind.
            [Some(keys), values].into_iter().flatten().filter(|rows| rows.dim > 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::Emulated;
    use crate::backend::gpu::emulated::Config;
    use crate::backend::ops::StateSize;
    use crate::forward::gpu::cache::CacheCopies;
    use crate::model::kv::{CacheType, KvCache};
    use proptest::prelude::*;
    use std::sync::Arc;

    const N_CTX: usize = 24;

    const ON_CPU: usize = 3;

    fn layers() -> [LayerShape; 5] {
        [
            LayerShape::Heads { n_head_kv: 3, k_dim: 64, v_dim: 32 },
            LayerShape::State(StateSize { n_past: 12, n_state: 16 }),
            LayerShape::Latent { dim: 96, index: 32, kept: 0 },
            LayerShape::Heads { n_head_kv: 1, k_dim: 32, v_dim: 32 },
            LayerShape::Heads { n_head_kv: 2, k_dim: 32, v_dim: 32 },
        ]
    }

    fn copies(n_bytes: usize) -> Arc<CacheCopies> {
        let gpu = Emulated::devices(&Config::default()).swap_remove(0);
        Arc::new(CacheCopies::of_size(&gpu, n_bytes).unwrap())
    }

    /// Two caches with equal bytes, on a device and on the CPU.
    fn caches(copies: &Arc<CacheCopies>, types: [CacheType; 2], seed: u8) -> (GpuCache, KvCache) {
        let on_device = |slot: usize| slot != ON_CPU;
        let device = GpuCache::new(copies, &layers(), &on_device, N_CTX, types).unwrap();
        let mut shapes = layers();
        shapes[ON_CPU] = LayerShape::ELSEWHERE;
        let mut host = KvCache::new(&shapes, N_CTX, types[0], types[1]);
        assert_eq!(device.bytes_of(3), host.bytes_of(3));
        let bytes = (0..host.bytes_of(N_CTX)).map(|i| (i as u8).wrapping_mul(31) ^ seed);
        let bytes: Vec<u8> = bytes.collect();
        host.restore(&(0..N_CTX), &bytes);
        device.restore(&(0..N_CTX), &[&bytes]).unwrap();
        (device, host)
    }

    fn save(cache: &GpuCache, positions: &Range<usize>, n: usize) -> Vec<Vec<u8>> {
        let mut pages = vec![vec![0; cache.bytes_of(n)]; positions.len() / n];
        let mut parts: Vec<_> = pages.iter_mut().map(|page| &mut page[..]).collect();
        cache.save(positions, &mut parts).unwrap();
        pages
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn positions_are_moved_as_on_the_cpu(
            types in [0..9usize, 0..9usize].prop_map(|types| types.map(|i| CacheType::ALL[i])),
            start in 0..4usize,
            n in 1..6usize,
            n_pages in 1..5usize,
            // At least the longest row.
            n_bytes in 384..3000usize,
        ) {
            let (positions, all) = (start..start + n * n_pages, 0..N_CTX);
            let copies = copies(n_bytes);
            let (from, from_host) = caches(&copies, types, 1);
            let pages = save(&from, &positions, n);
            for (first, page) in positions.clone().step_by(n).zip(&pages) {
                prop_assert!(*page == from_host.save(&(first..first + n)));
            }
            let (restored, _) = caches(&copies, types, 9);
            let (copied, mut expected) = caches(&copies, types, 9);
            let parts: Vec<_> = pages.iter().map(|page| &page[..]).collect();
            restored.restore(&positions, &parts).unwrap();
            copied.copy_from(&from, &positions).unwrap();
            expected.copy_from(&from_host, &positions);
            for cache in [restored, copied] {
                prop_assert!(save(&cache, &all, N_CTX) == [expected.save(&all)]);
            }
        }
    }
}
