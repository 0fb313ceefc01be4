//! Which machine an expert belongs to. Each machine has a part of the experts as large as its part
//! of all memory, by weighted rendezvous hashing: every expert goes to the machine with the lowest
//! score for it, so that one that leaves or comes moves its own experts alone.

use crate::policy::{Expert, mix};

/// The machine that has the file and the text.
pub const HEAD: usize = 0;

/// A machine that experts are dealt to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Names the machine, whatever the others are.
    pub id: u64,
    /// Bytes of memory for experts; 0 while it cannot be asked.
    pub memory: u64,
}

/// The machine of each expert: 0 is the head, others are peers in their order from 1 on.
#[derive(Clone, Debug, Default)]
pub struct Owners {
    /// The first expert's place of each layer in `of`.
    starts: Vec<usize>,
    of: Vec<u16>,
}

impl Owners {
    /// Deals `n_experts` of each layer to `shares`, the head's first.
    pub fn new(n_experts: &[usize], shares: &[Share]) -> Owners {
        let mut owners = Owners::default();
        for (layer, n) in n_experts.iter().enumerate() {
            owners.starts.push(owners.of.len());
            let expert = |expert| Expert { layer: layer as u32, expert };
            owners.of.extend((0..*n as u32).map(|e| owner(expert(e), shares)));
        }
        owners
    }

    pub fn of(&self, expert: Expert) -> usize {
        usize::from(self.of[self.starts[expert.layer as usize] + expert.expert as usize])
    }
}

fn owner(expert: Expert, shares: &[Share]) -> u16 {
    let score = |share: &Share| {
        let number = u64::from(expert.layer) << 32 | u64::from(expert.expert);
        let bits = mix(mix(number) ^ share.id);
        // In 0..1, neither of them.
        let uniform = ((bits >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
        -uniform.ln() / share.memory as f64
    };
    let able = shares.iter().enumerate().filter(|(_, share)| share.memory > 0);
    let best = able.min_by(|a, b| score(a.1).total_cmp(&score(b.1)));
    best.map_or(HEAD, |(machine, _)| machine) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const N_EXPERTS: [usize; 3] = [512, 0, 1024];

    fn dealt(memory: &[u64]) -> Owners {
        let share = |(i, memory): (usize, &u64)| Share { id: mix(i as u64 + 9), memory: *memory };
        Owners::new(&N_EXPERTS, &memory.iter().enumerate().map(share).collect::<Vec<_>>())
    }

    fn count(owners: &Owners, machine: usize) -> usize {
        owners.of.iter().filter(|owner| usize::from(**owner) == machine).count()
    }

    #[test]
    fn parts_are_as_large_as_memories() {
        let owners = dealt(&[1 << 30, 2 << 30, 1 << 30, 0]);
        let parts = [0, 1, 2, 3].map(|machine| count(&owners, machine));
        assert_eq!((parts.iter().sum::<usize>(), parts[3]), (1536, 0));
        for (part, expected) in parts.into_iter().zip([384, 768, 384]) {
            assert!(part.abs_diff(expected) < expected / 5, "{parts:?}");
        }
    }

    #[test]
    fn who_leaves_moves_its_own_experts_alone() {
        let (all, fewer) = (dealt(&[5, 5, 5, 5]), dealt(&[5, 5, 0, 5]));
        for (before, after) in all.of.iter().zip(&fewer.of) {
            assert!(before == after || *before == 2 && *after != 2);
        }
        assert!(count(&all, 2) > 0 && count(&fewer, 2) == 0);
    }

    #[test]
    fn without_peers_all_are_the_heads() {
        let owners = dealt(&[0, 0]);
        assert_eq!(count(&owners, HEAD), 1536);
        assert_eq!(owners.of(Expert { layer: 2, expert: 1023 }), HEAD);
    }
}
