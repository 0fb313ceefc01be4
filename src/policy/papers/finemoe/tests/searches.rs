//! Searches against similarities computed plainly from what is stored.

use super::*;
use crate::policy::papers::finemoe::select::{select, threshold};

/// A store of some iterations and new ones, some of which are old ones.
fn seeds() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0u64..400, 1..20)
}

/// The last iteration's similarities to the stored ones, layers that `heard` does not name left
/// out on both sides.
fn plain(store: &MapStore, new: &Iteration, heard: &[bool]) -> Vec<f64> {
    let only = |iteration: Iteration| Iteration {
        map: iteration
            .map
            .into_iter()
            .zip(heard)
            .filter(|(_, h)| **h)
            .map(|(row, _)| row)
            .collect(),
        ..iteration
    };
    let new = only(new.clone());
    let old = (0..store.len()).map(|index| only(stored(store, &shape(), index)));
    old.map(|old| trajectory_similarity(&new, &old, usize::MAX)).collect()
}

proptest! {
    /// Layer by layer, with gaps.
    #[test]
    fn the_trajectory_search_finds_the_most_similar(
        old in seeds(),
        new in 0u64..400,
        heard in prop::collection::vec(prop::bool::weighted(0.8), 3),
        peak in 1u32..4,
    ) {
        let (shape, peak) = (shape(), peak as f32);
        let mut store = MapStore::new(&shape, 12, 1);
        for &seed in &old {
            insert(&mut store, &shape, &iteration(&shape, seed, peak));
        }
        let new = iteration(&shape, new, peak);
        let mut trajectory = Trajectory::new(&store);
        prop_assert_eq!(trajectory.best(), None);
        for ordinal in 0..3 {
            let mut so_far = heard[..=ordinal].to_vec();
            so_far.resize(3, false);
            // On any scale.
            let probs: Vec<f32> = new.map[ordinal].iter().map(|p| 3.0 * p).collect();
            let probs = if heard[ordinal] { &probs[..] } else { &[] };
            trajectory.push(&store, MOE_LAYERS[ordinal], probs);
            let Some(Match { index, score }) = trajectory.best() else {
                prop_assert!(!so_far.contains(&true));
                continue;
            };
            let plain = plain(&store, &new, &so_far);
            let max = plain.iter().copied().fold(f64::MIN, f64::max);
            prop_assert!((f64::from(score) - plain[index]).abs() < 1e-5);
            prop_assert!(plain[index] > max - 1e-5);
        }
        prop_assert_eq!(trajectory.is_complete(), !heard.contains(&false));
    }

    /// The store goes on while a trajectory is under way: to the bit as if it had begun later.
    #[test]
    fn a_refreshed_trajectory_is_one_from_scratch(
        old in seeds(),
        new in prop::collection::vec((0u64..400, 0usize..3), 0..20),
    ) {
        let shape = shape();
        let mut store = MapStore::new(&shape, 8, 1);
        for &seed in &old {
            insert(&mut store, &shape, &iteration(&shape, seed, 2.0));
        }
        let own = iteration(&shape, 100, 2.0);
        let rows: Vec<(u32, &Vec<f32>)> = MOE_LAYERS.into_iter().zip(&own.map).collect();
        let push = |trajectory: &mut Trajectory, store: &MapStore, rows: &[(u32, &Vec<f32>)]| {
            rows.iter().for_each(|(layer, probs)| trajectory.push(store, *layer, probs));
        };
        let mut under_way = Trajectory::new(&store);
        let mut at = 0;
        for &(seed, to) in &new {
            push(&mut under_way, &store, &rows[at..to.max(at)]);
            at = at.max(to);
            let index = insert(&mut store, &shape, &iteration(&shape, seed, 2.0));
            under_way.refresh(&store, index);
            let mut fresh = Trajectory::new(&store);
            push(&mut fresh, &store, &rows[..at]);
            let (mut a, mut b) = (Vec::new(), Vec::new());
            under_way.scores(&mut a);
            fresh.scores(&mut b);
            prop_assert_eq!(a, b);
        }
    }

    #[test]
    fn the_semantic_search_finds_the_most_similar(old in seeds(), new in 0u64..400) {
        let shape = shape();
        let mut store = MapStore::new(&shape, 20, 1);
        prop_assert_eq!(store.nearest(&embedding(new, 64)), None);
        for &seed in &old {
            insert(&mut store, &shape, &iteration(&shape, seed, 2.0));
        }
        let similarity = |seed: u64| cosine(&embedding(seed, 64), &embedding(new, 64));
        let max = old.iter().map(|&seed| similarity(seed)).fold(f64::MIN, f64::max);
        let Match { index, score } = store.nearest(&embedding(new, 64)).unwrap();
        prop_assert!((f64::from(score) - similarity(old[index])).abs() < 0.01);
        prop_assert!(similarity(old[index]) > max - 0.02);
        prop_assert_eq!(store.nearest(&[0.0; 64]), None);
    }

    /// Eqs. 6 to 8, by trying every number of experts.
    #[test]
    fn selection_is_the_smallest_that_is_enough(
        weights in prop::collection::vec(0u32..100, 1..30),
        score in -1.0f32..1.0,
        floor in prop_oneof![Just(f32::INFINITY), 0.0f32..0.5],
        k in 1usize..6,
    ) {
        let sum = weights.iter().sum::<u32>().max(1) as f32;
        let probs: Vec<f32> = weights.iter().map(|w| *w as f32 / sum).collect();
        let order = top_k(&probs, probs.len());
        let p = |expert: u32| probs[expert as usize];
        let delta = threshold(score);
        prop_assert_eq!(delta, (1.0 - score).clamp(0.0, 1.0));
        let mut picks = vec![(99, 0.5)];
        select(order.iter().map(|&expert| (expert, p(expert))), delta, floor, k, &mut picks);
        let enough = |n: usize| {
            let sum = order[..n].iter().map(|&expert| p(expert)).sum::<f32>();
            n >= k && sum >= delta && order[n..].iter().all(|&expert| p(expert) <= floor)
        };
        let n = (0..order.len()).find(|&n| enough(n)).unwrap_or(order.len());
        let expected: Vec<_> = order[..n].iter().map(|&expert| (expert, p(expert))).collect();
        prop_assert_eq!(picks, expected);
    }
}

#[test]
fn equals_go_to_the_first() {
    let shape = shape();
    let mut store = MapStore::new(&shape, 9, 1);
    for seed in [7, 300, 300, 7] {
        insert(&mut store, &shape, &iteration(&shape, seed, 2.0));
    }
    let new = iteration(&shape, 300, 2.0);
    assert_eq!(store.nearest(&new.embedding).unwrap().index, 1);
    assert_eq!(trajectory(&store, &shape, &new).best().unwrap().index, 1);
}

#[test]
fn what_is_no_distribution_was_not_said() {
    let shape = shape();
    let mut store = MapStore::new(&shape, 9, 1);
    insert(&mut store, &shape, &iteration(&shape, 7, 2.0));
    let mut trajectory = Trajectory::new(&store);
    let bad: [&[f32]; 6] = [
        &[],
        &[0.5; 5],
        &[0.0; 6],
        &[0.5, -0.5, 1.0, 0.0, 0.0, 0.0],
        &[f32::NAN, 0.5, 0.5, 0.0, 0.0, 0.0],
        &[f32::INFINITY, 0.5, 0.5, 0.0, 0.0, 0.0],
    ];
    for probs in bad {
        trajectory.push(&store, 1, probs);
        assert_eq!(trajectory.best(), None, "{probs:?}");
    }
    trajectory.push(&store, 0, &[1.0]);
    trajectory.push(&store, 77, &[1.0]);
    assert_eq!(trajectory.best(), None);
}

#[test]
fn measures_of_whole_iterations() {
    let a = Iteration { embedding: vec![1.0, 0.0], map: vec![vec![0.6, 0.4, 0.0], vec![0.0, 1.0]] };
    let b = Iteration { embedding: vec![1.0, 1.0], map: vec![vec![0.6, 0.0, 0.4], vec![1.0, 0.0]] };
    assert!((semantic_similarity(&a, &b) - 0.5f64.sqrt()).abs() < 1e-12);
    assert!((trajectory_similarity(&a, &b, 1) - 0.36 / 0.52).abs() < 1e-7);
    assert!((trajectory_similarity(&a, &b, 2) - 0.36 / 1.52).abs() < 1e-7);
    assert_eq!(top_k(&[0.2, 0.4, 0.2, 0.2], 3), [1, 0, 2]);
    assert_eq!(top_k_overlap(&a, &b, 1), 0.5);
    assert_eq!(top_k_overlap(&a, &b, 2), 0.75);
}
