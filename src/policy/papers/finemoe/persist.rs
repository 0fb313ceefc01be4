//! The store as bytes.
//!
//! Layout, little-endian: d, number of maps n, values of an embedding's sketch, number of MoE
//! layers (u32 each); for each MoE layer its number, its experts and how many of them a row keeps
//! (u32 each); the sketches, i8 [n, values]; then for each MoE layer scale and rest of each row,
//! f32 [n, 2], ids, u16 [n, kept], and levels, u8 [n, kept]. Norms are recomputed.
//!
//! Maps do not depend on d, which only weights what a full store replaces, so a store can go on
//! with another d.

use super::row::Head;
use super::sketch::DIMS;
use super::store::{MapStore, Rows};
use crate::policy::Shape;

/// Positions in the header.
const DISTANCE: usize = 0;
const N_MAPS: usize = 1;

/// scale and rest
const HEAD_BYTES: usize = 2 * size_of::<f32>();

impl MapStore {
    pub(super) fn save(&self) -> Vec<u8> {
        let header = self.header();
        let mut out = Vec::with_capacity(header.len() * 4 + self.len() * self.saved_map_bytes());
        header.iter().for_each(|value| out.extend(value.to_le_bytes()));
        out.extend(self.sketches.values().iter().map(|value| *value as u8));
        for rows in &self.rows {
            for head in &rows.heads {
                out.extend(head.scale.to_le_bytes());
                out.extend(head.rest.to_le_bytes());
            }
            rows.ids.iter().for_each(|id| out.extend(id.to_le_bytes()));
            out.extend(&rows.levels);
        }
        out
    }

    /// Keeps the first maps if there are more than the capacity. Refuses a store of another shape:
    /// returns the reason as a clause, for use after a colon.
    pub(super) fn restore(
        shape: &Shape,
        capacity: usize,
        distance: usize,
        bytes: &[u8],
    ) -> Result<MapStore, String> {
        let mut store = MapStore::new(shape, capacity, distance);
        let mut expected = store.header();
        let split = bytes.split_at_checked(expected.len() * size_of::<u32>());
        let (header, mut rest) = split.ok_or("it ends too early")?;
        let header: Vec<u32> =
            header.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let (d, n) = (header[DISTANCE], header[N_MAPS] as usize);
        let n_layers = store.layers.len().max(1);
        if !(1..=n_layers).contains(&(d as usize)) {
            return Err(format!("its prefetch distance of {d} does not fit {n_layers} layers"));
        }
        (expected[DISTANCE], expected[N_MAPS]) = (header[DISTANCE], header[N_MAPS]);
        if header != expected {
            return Err("it belongs to a model of another shape".into());
        }
        if n.checked_mul(store.saved_map_bytes()) != Some(rest.len()) {
            return Err(format!("its length is not that of {n} expert maps"));
        }
        store.n_maps = n.min(store.capacity);
        let (sketches, tail) = rest.split_at(n * DIMS);
        rest = tail;
        for sketch in sketches.chunks_exact(DIMS).take(store.n_maps) {
            store.sketches.push_values(sketch);
        }
        for rows in &mut store.rows {
            let (own, tail) = rest.split_at(n * saved_row_bytes(rows));
            rest = tail;
            rows.restore(own, n, store.n_maps)?;
        }
        Ok(store)
    }

    fn header(&self) -> Vec<u32> {
        let mut out = vec![self.distance, self.len(), DIMS, self.rows.len()];
        for (ordinal, rows) in self.rows.iter().enumerate() {
            let layer = self.layers.number(ordinal) as usize;
            out.extend([layer, rows.n_experts, rows.kept]);
        }
        out.into_iter().map(|value| value as u32).collect()
    }

    fn saved_map_bytes(&self) -> usize {
        DIMS + self.rows.iter().map(saved_row_bytes).sum::<usize>()
    }
}

fn saved_row_bytes(rows: &Rows) -> usize {
    HEAD_BYTES + rows.kept * (size_of::<u16>() + size_of::<u8>())
}

impl Rows {
    /// `bytes` hold `n` rows, of which `wanted` are taken.
    fn restore(&mut self, bytes: &[u8], n: usize, wanted: usize) -> Result<(), String> {
        let (heads, bytes) = bytes.split_at(n * HEAD_BYTES);
        let (ids, levels) = bytes.split_at(n * self.kept * size_of::<u16>());
        let ids = &ids.as_chunks().0[..wanted * self.kept];
        self.ids.extend(ids.iter().map(|b| u16::from_le_bytes(*b)));
        self.levels.extend(&levels[..wanted * self.kept]);
        let heads = heads.as_chunks().0.chunks_exact(2).take(wanted);
        let levels = self.levels.chunks_exact(self.kept);
        for ((head, ids), levels) in heads.zip(self.ids.chunks_exact(self.kept)).zip(levels) {
            let (scale, rest) = (f32::from_le_bytes(head[0]), f32::from_le_bytes(head[1]));
            let head = Head::new(scale, rest, levels, self.n_experts);
            if !is_row(&head, ids, levels, self.n_experts) {
                return Err("it has rows that are not probability distributions".into());
            }
            self.heads.push(head);
        }
        Ok(())
    }
}

/// Whether this could have been encoded.
fn is_row(head: &Head, ids: &[u16], levels: &[u8], n_experts: usize) -> bool {
    let probabilities = 0.0..=1.0;
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    probabilities.contains(&head.scale)
        && probabilities.contains(&head.rest)
        && head.norm2 > 0.0
        && levels.is_sorted_by(|a, b| a >= b)
        && sorted.is_sorted_by(|a, b| a < b)
        && sorted.last().is_some_and(|&id| usize::from(id) < n_experts)
}
