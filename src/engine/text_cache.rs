//! The KV cache of one text: on the CPU, and on a device for the layers that it has.
//!
//! A device that fails a copy is lost, and the next pass fails for the same reason: a copy to it
//! only logs a warning.

use crate::Result;
use crate::forward::gpu::GpuCache;
use crate::model::kv::{KvCache, States};
use std::ops::Range;

pub struct TextCache {
    pub host: KvCache,
    /// Present where a device has layers; `host` has the others.
    pub device: Option<GpuCache>,
}

impl TextCache {
    /// Whether some layer has a state, which no position can be taken from.
    pub fn has_state(&self) -> bool {
        self.host.has_state() || self.device.as_ref().is_some_and(GpuCache::has_state)
    }

    /// Values of all states; 0 for a model without any.
    pub fn n_state_values(&self) -> usize {
        let on_device = self.device.as_ref().map_or(0, GpuCache::n_state_values);
        self.host.n_state_values() + on_device
    }

    /// Bytes of the keys and values of `n` positions.
    pub fn bytes_of(&self, n: usize) -> usize {
        self.host.bytes_of(n) + self.device.as_ref().map_or(0, |device| device.bytes_of(n))
    }

    /// The keys and values of some positions, in pages of `n` each.
    pub fn save(&self, positions: &Range<usize>, n: usize) -> Result<Vec<Vec<u8>>> {
        let starts = positions.clone().step_by(n);
        let mut pages: Vec<_> = starts.map(|start| self.host.save(&(start..start + n))).collect();
        if let Some(device) = &self.device {
            let (first, n_bytes) = (self.host.bytes_of(n), self.bytes_of(n));
            pages.iter_mut().for_each(|page| page.resize(n_bytes, 0));
            let mut parts: Vec<_> = pages.iter_mut().map(|page| &mut page[first..]).collect();
            device.save(positions, &mut parts)?;
        }
        Ok(pages)
    }

    /// Puts back pages of [`TextCache::save`].
    pub fn restore(&mut self, positions: &Range<usize>, pages: &[&[u8]]) {
        let n = positions.len() / pages.len();
        let first = self.host.bytes_of(n);
        for (start, page) in positions.clone().step_by(n).zip(pages) {
            self.host.restore(&(start..start + n), &page[..first]);
        }
        if let Some(device) = &self.device {
            let parts: Vec<_> = pages.iter().map(|page| &page[first..]).collect();
            warn(device.restore(positions, &parts));
        }
    }

    /// Copies positions of another text of the same engine.
    pub fn copy_from(&mut self, other: &TextCache, positions: &Range<usize>) {
        self.host.copy_from(&other.host, positions);
        if let (Some(to), Some(from)) = (&self.device, &other.device) {
            warn(to.copy_from(from, positions));
        }
    }

    /// Takes back positions from `n` of `n_past` on; returns the number of positions that are left.
    /// Layers with a state cannot take back positions: they start over.
    pub fn truncate(&mut self, n_past: usize, n: usize) -> usize {
        if !self.has_state() || n >= n_past {
            return n.min(n_past);
        }
        self.host.clear_states();
        self.device.iter().for_each(|device| warn(device.clear_states()));
        0
    }

    /// Asks the next pass for the states after each of these numbers of positions.
    pub fn mark(&mut self, positions: &[usize]) {
        self.host.mark(positions, self.n_state_values());
    }

    /// Asks the next pass for more states; returns the positions that were not asked for before.
    pub fn mark_more(&mut self, positions: Range<usize>) -> Vec<usize> {
        let n_values = self.n_state_values();
        positions.filter(|n| self.host.mark_one_more(*n, n_values)).collect()
    }

    /// The states that the pass was asked for and has come to.
    pub fn take_states(&mut self) -> Vec<States> {
        self.host.take_states(self.n_state_values())
    }

    /// Puts states back.
    pub fn restore_states(&mut self, values: &[f32]) {
        let (on_host, on_device) = values.split_at(self.host.n_state_values());
        self.host.restore_states(on_host);
        self.device.iter().for_each(|device| warn(device.restore_states(on_device)));
    }

    /// Copies the states of another text of the same engine.
    pub fn copy_states(&mut self, other: &TextCache) {
        self.host.copy_states(&other.host);
        if let (Some(to), Some(from)) = (&self.device, &other.device) {
            warn(to.copy_states(from));
        }
    }
}

fn warn(result: Result<()>) {
    if let Err(why) = result {
        log::warn!("{why}");
    }
}
