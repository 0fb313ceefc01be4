//! Time: whose jobs have used how much of it, and how prompts and decode share it.

use std::collections::HashMap;
use std::time::Duration;

use super::job::Owner;
use super::share::Share;
use super::status::Counts;
use crate::engine::speculation::Gate;
use crate::engine::traffic::TrafficMeter;

pub struct Ledger {
    pub share: Share,
    pub counts: Counts,
    pub gate: Gate,
    pub traffic: TrafficMeter,
    /// Time that owners have used, divided by their weights, in ns.
    used: HashMap<u64, u64>,
}

impl Ledger {
    pub fn new(prompt_share: f64) -> Ledger {
        let (share, counts) = (Share::new(prompt_share), Counts::default());
        let (gate, traffic) = (Gate::default(), TrafficMeter::default());
        Ledger { share, counts, gate, traffic, used: HashMap::new() }
    }

    /// An owner brings a job. One that had none counts as if it had used as much as the one of the
    /// `active` ones that has used the least: time cannot be saved up.
    pub fn enter(&mut self, owner: Owner, active: &[Owner]) {
        let is_active = |id: u64| active.iter().any(|other| other.id == id);
        if is_active(owner.id) {
            return;
        }
        self.used.retain(|id, _| is_active(*id));
        let least = self.used.values().copied().min().unwrap_or(0);
        self.used.insert(owner.id, least);
    }

    /// Divides a pass's time among the owners of its tokens.
    pub fn charge_all(&mut self, n_tokens: &[(Owner, usize)], time: Duration) {
        let total: usize = n_tokens.iter().map(|(_, n)| n).sum();
        for (owner, n) in n_tokens {
            self.charge(*owner, time.mul_f64(*n as f64 / total.max(1) as f64));
        }
    }

    /// Counts time that an owner's job has used.
    fn charge(&mut self, owner: Owner, time: Duration) {
        let used = self.used.entry(owner.id).or_insert(0);
        *used = used.saturating_add(time.as_nanos() as u64 / u64::from(owner.weight.max(1)));
    }

    /// Time that an owner has used for its weight, in ns.
    pub fn used(&self, owner: Owner) -> u64 {
        self.used.get(&owner.id).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each of two owners is next when both always have a job, after `start`.
    fn turns(mut ledger: Ledger, owners: [Owner; 2], n: usize) -> [usize; 2] {
        let mut turns = [0, 0];
        for _ in 0..n {
            let i = usize::from(ledger.used(owners[1]) < ledger.used(owners[0]));
            turns[i] += 1;
            ledger.charge(owners[i], Duration::from_millis(10));
        }
        turns
    }

    #[test]
    fn time_is_shared_by_weight() {
        let owners = [Owner { id: 1, weight: 1 }, Owner { id: 2, weight: 3 }];
        assert_eq!(turns(Ledger::new(0.5), owners, 40), [10, 30]);
    }

    #[test]
    fn an_owner_that_was_away_saves_no_time_up() {
        let owners = [Owner { id: 1, weight: 1 }, Owner { id: 2, weight: 1 }];
        let mut ledger = Ledger::new(0.5);
        ledger.enter(owners[0], &[]);
        ledger.charge(owners[0], Duration::from_secs(100));
        ledger.enter(owners[1], &[owners[0]]);
        assert_eq!(turns(ledger, owners, 20), [10, 10]);
    }

    #[test]
    fn owners_without_jobs_are_forgotten() {
        let mut ledger = Ledger::new(0.5);
        for id in 0..1000 {
            ledger.enter(Owner { id, weight: 1 }, &[]);
        }
        assert_eq!(ledger.used.len(), 1);
    }
}
