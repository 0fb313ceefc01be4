//! The speed of decode that a plan would have on this machine: the bytes that a token reads, by the
//! rates at which memory and disk bring them, which are measured for a second.

use crate::engine::MemoryPlan;
use crate::engine::plan::memory;
use crate::engine::plan::ram::Place;
use crate::machine::disk::Disk;
use crate::machine::product_rate;
use crate::units::{at_least, size};
use crate::{Error, Result};
use std::path::Path;

/// The part of a token's time that products take; attention, norms and waiting are the rest
/// (bench/PROFILE.md).
const PRODUCTS: f64 = 0.9;

/// Hits of trained models' texts by the part of the experts that memory holds, under the default
/// policy (bench/reports/policies.md): a token's experts are not drawn by chance.
const HITS: [(f64, f64); 5] = [(0.0, 0.0), (0.25, 0.54), (0.5, 0.80), (0.75, 0.93), (1.0, 1.0)];

/// Bytes a second.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Weights in memory, as products take them.
    pub products: f64,
    /// Random reads; `None` where nothing is read from disk.
    pub disk: Option<f64>,
}

impl Rates {
    /// Measures what the plan needs: `path` is the model's file, or a folder on its disk.
    pub fn measure(plan: &MemoryPlan, path: &Path) -> Result<Rates> {
        let available = memory::available_bytes();
        let mut seconds = 0.0;
        // What comes after the first two is little.
        let measured = &plan.token_types[..plan.token_types.len().min(2)];
        let of_measured: u64 = measured.iter().map(|(_, bytes)| bytes).sum();
        for (ty, bytes) in measured {
            let rate = product_rate::gb_per_second(*ty, plan.n_threads, available);
            let rate = rate.map_err(|e| Error::io("memory", e))?;
            seconds += *bytes as f64 / (1e9 * rate.median());
        }
        let products = of_measured as f64 / seconds;
        let disk = match plan.place {
            Place::Streamed { .. } if plan.resident_share() < 1.0 => {
                Some(1e9 * Disk::measure(path)?.gb_per_second.median())
            }
            _ => None,
        };
        Ok(Rates { products, disk })
    }
}

/// Tokens a second at least and at most. At least: experts drawn by chance, and a disk that waits
/// while the processor computes. At most: hits as texts of trained models have them, and a disk
/// that reads meanwhile.
pub fn decode(plan: &MemoryPlan, rates: &Rates) -> (f64, f64) {
    let share = plan.resident_share();
    let computed = in_memory(plan, rates);
    let read = |hits: f64| {
        let missed = plan.expert_bytes_per_token as f64 * (1.0 - hits);
        rates.disk.map_or(0.0, |disk| missed / disk)
    };
    (1.0 / (computed + read(share)), 1.0 / computed.max(read(hits(share))))
}

/// Seconds of a token whose weights are all in memory.
fn in_memory(plan: &MemoryPlan, rates: &Rates) -> f64 {
    let bytes = plan.expert_bytes_per_token + plan.dense_bytes_per_token;
    bytes as f64 / rates.products / PRODUCTS
}

/// The hits of a text where memory holds this part of the experts.
fn hits(share: f64) -> f64 {
    let after = HITS.iter().position(|(at, _)| *at >= share).unwrap_or(HITS.len() - 1).max(1);
    let ((x0, y0), (x1, y1)) = (HITS[after - 1], HITS[after]);
    y0 + (y1 - y0) * ((share - x0) / (x1 - x0)).clamp(0.0, 1.0)
}

/// A line of `--dry-run`: a name, bytes, and a note.
pub fn line(what: &str, bytes: u64, note: &str) -> String {
    row(what, &size(bytes), note)
}

/// A line of `--dry-run`: a name, a number with its unit, and a note.
pub fn row(what: &str, size: &str, note: &str) -> String {
    let (number, unit) = size.split_once(' ').unwrap_or((size, ""));
    format!("{what:<16} {number:>12} {unit:<3}  {note}").trim_end().to_owned()
}

/// Lines for `--dry-run`.
pub fn lines(plan: &MemoryPlan, rates: &Rates) -> Vec<String> {
    let (least, most) = decode(plan, rates);
    let gb = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
    let products = format!("products take weights at {}", gb(rates.products));
    let all = 1.0 / in_memory(plan, rates);
    match rates.disk {
        None => vec![row(
            "decode here",
            &format!("{all:.1} t/s"),
            &format!("{products}, just measured"),
        )],
        Some(disk) => {
            let missing = plan.sizes.slot_bytes - plan.expert_budget().unwrap_or(0);
            let note = format!("{products}, the disk reads {}, just measured", gb(disk));
            let more = format!("with {} more memory, for all experts", at_least(missing));
            vec![
                row("decode here", &format!("{least:.1}–{most:.1} t/s"), &note),
                row("", &format!("{all:.1} t/s"), &more),
            ]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_lie_on_the_lines_between_measured_ones() {
        for (share, expected) in [(0.0, 0.0), (0.25, 0.54), (0.375, 0.67), (1.0, 1.0), (2.0, 1.0)] {
            assert!((hits(share) - expected).abs() < 1e-9, "{share}: {}", hits(share));
        }
        let all = (0..=100).map(|n| hits(f64::from(n) / 100.0));
        assert!(all.clone().zip(all.skip(1)).all(|(a, b)| a < b));
    }
}
