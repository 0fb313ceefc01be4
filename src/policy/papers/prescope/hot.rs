//! Eviction by the hot-expert table (PreScope): all experts of a model by how many tokens they have
//! processed, in a profile. It is static: the hottest experts are resident, whatever a run does.

use crate::policy::{Event, Eviction, Expert, HotTable, Profile, Shape};

/// Drops the coldest expert of the profile's table. Without a profile the counts so far serve.
#[derive(Clone, Debug)]
pub struct Hot {
    profile: Option<HotTable>,
    /// Counts of all runs, this one included, for the next run's profile.
    all: HotTable,
}

impl Hot {
    pub fn new(shape: &Shape) -> Self {
        Self::with(HotTable::new(shape))
    }

    /// With the table of earlier runs; one without any counts is none.
    pub fn with(table: HotTable) -> Self {
        let profile = (!table.is_empty()).then(|| table.clone());
        Self { profile, all: table }
    }
}

impl Eviction for Hot {
    fn observe(&mut self, event: &Event<'_>) {
        self.all.observe(event);
    }

    fn priority(&self, expert: Expert) -> f64 {
        self.profile.as_ref().unwrap_or(&self.all).tokens(expert) as f64
    }

    fn save(&self, profile: &mut Profile) {
        self.all.save(profile);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{PromptRouted, Routed};
    use proptest::prelude::*;

    /// Layer 1 is dense.
    const N_EXPERTS: [usize; 3] = [5, 0, 3];

    fn shape() -> Shape {
        Shape::of_model(N_EXPERTS.to_vec(), 2)
    }

    fn everyone() -> impl Iterator<Item = Expert> {
        let layers = [(0, 5), (2, 3)].into_iter();
        layers.flat_map(|(layer, n)| (0..n).map(move |expert| Expert { layer, expert }))
    }

    /// A decode step's expert, or all experts' tokens of a prompt.
    type Act = (bool, bool, u32, Vec<u32>);

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let counts = prop::collection::vec(0u32..5, 5);
        let act = (any::<bool>(), any::<bool>(), 0u32..15, counts);
        prop::collection::vec(act, 0..40)
    }

    fn play(acts: &[Act], hot: &mut Hot) {
        for (is_first, is_prompt, at, counts) in acts {
            let layer = if *is_first { 0 } else { 2 };
            let n = N_EXPERTS[layer as usize];
            if *is_prompt {
                let counts = &counts[..n];
                let n_tokens = counts.iter().sum();
                let probs = &[][..];
                let chosen = &[][..];
                let routed = PromptRouted { request: 0, layer, n_tokens, counts, probs, chosen };
                hot.observe(&Event::PromptRouted(routed));
            } else {
                let (chosen, probs, hidden) = (&[at % n as u32][..], &[][..], &[][..]);
                let routed = Routed { request: 0, layer, chosen, probs, hidden, ahead: None };
                hot.observe(&Event::Routed(routed));
            }
        }
    }

    fn tokens(acts: &[Act], of: Expert) -> u64 {
        let mine = acts.iter().filter(|act| act.0 == (of.layer == 0));
        let counts = mine.map(|(is_first, is_prompt, at, counts)| match is_prompt {
            true => u64::from(counts[of.expert as usize]),
            false => u64::from(at % N_EXPERTS[if *is_first { 0 } else { 2 }] as u32 == of.expert),
        });
        counts.sum()
    }

    fn saved(hot: &Hot) -> Vec<u8> {
        let mut profile = Profile::default();
        hot.save(&mut profile);
        profile.get(HotTable::SECTION).unwrap().to_vec()
    }

    proptest! {
        #[test]
        fn the_profile_of_earlier_runs_decides(first in acts(), second in acts()) {
            let mut hot = Hot::new(&shape());
            play(&first, &mut hot);
            for expert in everyone() {
                prop_assert_eq!(hot.priority(expert), tokens(&first, expert) as f64);
            }
            let table = HotTable::restore(&shape(), &saved(&hot)).unwrap();
            let mut ranked: Vec<Expert> = everyone().collect();
            ranked.sort_by_key(|expert| std::cmp::Reverse(tokens(&first, *expert)));
            prop_assert_eq!(table.ranking(), ranked);

            let is_cold = table.is_empty();
            let mut warm = Hot::with(table);
            play(&second, &mut warm);
            let both = [first.clone(), second.clone()].concat();
            let total = HotTable::restore(&shape(), &saved(&warm)).unwrap();
            for expert in everyone() {
                let decides = if is_cold { &second } else { &first };
                prop_assert_eq!(warm.priority(expert), tokens(decides, expert) as f64);
                prop_assert_eq!(total.tokens(expert), tokens(&both, expert));
            }
        }

        #[test]
        fn what_is_malformed_is_refused(
            cut in any::<prop::sample::Index>(),
            junk in any::<Vec<u8>>(),
        ) {
            let bytes = saved(&Hot::new(&shape()));
            prop_assert!(HotTable::restore(&shape(), &bytes).is_ok());
            prop_assert!(HotTable::restore(&shape(), &bytes[..cut.index(bytes.len())]).is_err());
            prop_assert!(HotTable::restore(&shape(), &[&bytes[..], &[0]].concat()).is_err());
            prop_assert!(HotTable::restore(&shape(), &junk).is_err());
            let other = Shape::of_model(vec![5, 3], 2);
            prop_assert!(HotTable::restore(&other, &bytes).is_err());
        }
    }
}
