//! The Timer (PreScope, section 4.1): what things take, from what passes were told to have taken.

use crate::experts::counters::Counters;
use crate::policy::{Costs, Measured, Phase, Timing};

/// Weight of a new figure in the running means: some tens of tokens count.
const WEIGHT: f64 = 1.0 / 32.0;

#[derive(Clone, Debug)]
pub struct Timer {
    n_layers: f64,
    n_moe_layers: f64,
    /// Bytes of an expert, the mean over the layers.
    expert_bytes: f64,
    costs: Option<Costs>,
    /// In place of what is measured.
    fixed: Option<Costs>,
}

impl Timer {
    /// `expert_bytes`: of one expert of each layer, 0 where a layer is dense.
    pub fn new(expert_bytes: &[u64]) -> Timer {
        let moe = || expert_bytes.iter().filter(|bytes| **bytes > 0);
        let n_moe_layers = moe().count().max(1) as f64;
        Timer {
            n_layers: expert_bytes.len().max(1) as f64,
            n_moe_layers,
            expert_bytes: moe().sum::<u64>() as f64 / n_moe_layers,
            costs: None,
            fixed: None,
        }
    }

    /// In lockstep times must not matter.
    pub fn in_lockstep(self) -> Timer {
        Timer { fixed: Some(Costs::LOCKSTEP), ..self }
    }

    /// A pass has ended. Prompts tell nothing of a token's time.
    pub fn observe(&mut self, phase: Phase, timing: &Timing) {
        if phase != Phase::Decode {
            return;
        }
        let Timing { wall_ns, stall_ns, experts_ns, head_ns } = *timing;
        let rest = wall_ns.saturating_sub(stall_ns + experts_ns + head_ns);
        let new = Costs {
            attention_ns: rest as f64 / self.n_layers,
            experts_ns: experts_ns as f64 / self.n_moe_layers,
            head_ns: head_ns as f64,
            load_ns: 0.0,
        };
        let old = self.costs.get_or_insert(new);
        let mix = |old: &mut f64, new: f64| *old += WEIGHT * (new - *old);
        mix(&mut old.attention_ns, new.attention_ns);
        mix(&mut old.experts_ns, new.experts_ns);
        mix(&mut old.head_ns, new.head_ns);
    }

    /// The measured costs; `None` before the first token and the first read.
    pub fn costs(&self, counters: &Counters) -> Option<Costs> {
        if self.fixed.is_some() {
            return self.fixed;
        }
        let costs = self.costs?;
        let ns_a_byte = counters.busy_ns as f64 / counters.read_bytes as f64;
        let load_ns = ns_a_byte * self.expert_bytes;
        load_ns.is_finite().then_some(Costs { load_ns, ..costs })
    }

    /// The costs for the profile.
    pub fn measured(&self, counters: &Counters) -> Option<Measured> {
        let costs = self.costs(counters)?;
        let n_needed = counters.hits_whole + counters.hits_partial + counters.misses;
        let brought = (counters.demand_bytes + counters.prefetch_used_bytes) as f64;
        let absent = brought / (n_needed as f64 * self.expert_bytes);
        absent.is_finite().then_some(Measured { costs, absent: absent.min(1.0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten experts were needed, of which four were brought: one when it was.
    #[test]
    fn prefetched_experts_were_absent_too() {
        let mut timer = Timer::new(&[0, 1000]);
        let counters = Counters {
            hits_whole: 8,
            hits_partial: 1,
            misses: 1,
            demand_bytes: 1000,
            prefetch_used_bytes: 3000,
            busy_ns: 500,
            read_bytes: 5000,
            ..Counters::default()
        };
        assert_eq!(timer.measured(&counters), None);
        timer.observe(Phase::Decode, &Timing { wall_ns: 1000, ..Timing::default() });
        let measured = timer.measured(&counters).unwrap();
        assert_eq!(Some(measured.costs), timer.costs(&counters));
        assert_eq!(measured.absent, 0.4);
        // Padding is no expert.
        let counters = Counters { demand_bytes: 1 << 20, ..counters };
        assert_eq!(timer.measured(&counters).unwrap().absent, 1.0);
        let nothing = Counters { hits_whole: 0, hits_partial: 0, misses: 0, ..counters };
        assert_eq!(timer.measured(&nothing), None);
    }

    #[test]
    fn a_token_is_taken_apart() {
        // Two layers, one with experts.
        let mut timer = Timer::new(&[0, 1000]);
        let counters = Counters { busy_ns: 500, read_bytes: 2000, ..Counters::default() };
        assert_eq!(timer.costs(&counters), None);
        let timing = Timing { wall_ns: 1000, stall_ns: 300, experts_ns: 200, head_ns: 100 };
        timer.observe(Phase::Prompt, &Timing { wall_ns: 1 << 40, ..timing });
        timer.observe(Phase::Decode, &timing);
        let costs =
            Costs { attention_ns: 200.0, experts_ns: 200.0, head_ns: 100.0, load_ns: 250.0 };
        assert_eq!(timer.costs(&counters), Some(costs));
        assert_eq!(timer.costs(&Counters::default()), None);
        // A change is followed, slowly.
        (0..10).for_each(|_| timer.observe(Phase::Decode, &Timing { head_ns: 200, ..timing }));
        let head = timer.costs(&counters).unwrap().head_ns;
        assert!(120.0 < head && head < 140.0, "{head}");
    }
}
