//! The error of compressed rows and embeddings, and the size of a map.

use super::*;
use crate::policy::papers::finemoe::row::{Encoder, KEPT, ranked};
use crate::policy::papers::finemoe::sketch::{DIMS, Sketch, Sketches};

proptest! {
    #[test]
    fn a_row_stays_a_distribution_in_its_order(
        weights in prop::collection::vec(0u32..1000, 1..200),
        peak in 0u32..4,
    ) {
        let weight = |w: &u32| (*w as f32 + 1.0).powi(peak as i32);
        let weights: Vec<f32> = weights.iter().map(weight).collect();
        let sum: f32 = weights.iter().sum();
        let probs: Vec<f32> = weights.iter().map(|w| w / sum).collect();
        let kept = KEPT.min(probs.len());
        let (mut ids, mut levels) = (vec![0; kept], vec![0; kept]);
        let head = Encoder::default().encode(&probs, &mut ids, &mut levels);
        let back: Vec<_> = ranked(head, &ids, &levels, probs.len()).collect();

        let mut experts: Vec<u32> = back.iter().map(|(expert, _)| *expert).collect();
        prop_assert_eq!(&experts[..kept], &top_k(&probs, kept)[..]);
        experts.sort();
        prop_assert_eq!(experts, (0..probs.len() as u32).collect::<Vec<_>>());
        prop_assert!(back.is_sorted_by(|a, b| a.1 >= b.1));
        for (expert, p) in &back[..kept] {
            let error = (p - probs[*expert as usize]).abs();
            prop_assert!(error <= 0.501 * head.scale + 1e-6, "{} {}", error, head.scale);
        }
        let tail: f32 = back[kept..].iter().map(|(expert, _)| probs[*expert as usize]).sum();
        let tail_back: f32 = back[kept..].iter().map(|(_, p)| p).sum();
        prop_assert!((tail - tail_back).abs() < 1e-5);
        let norm2: f32 = back.iter().map(|(_, p)| p * p).sum();
        prop_assert!((head.norm2 - norm2).abs() <= 1e-4 * norm2);
    }
}

/// Errors of trajectories' cosines over pairs like and unlike.
#[derive(Default)]
struct Errors {
    /// Largest, of the first layer alone.
    first: f64,
    /// Largest, of all 48 layers.
    all: f64,
    /// Root mean square, of all 48 layers.
    all_rms: f64,
    /// How much of a layer's probability its best eight experts have.
    share: f32,
}

fn trajectory_errors(n_experts: usize, peak: f32) -> Errors {
    let shape = Shape::of_model(vec![n_experts; 48], 8);
    let iterations: Vec<_> = (90..110).map(|seed| iteration(&shape, seed, peak)).collect();
    let mut store = MapStore::new(&shape, iterations.len(), 3);
    iterations.iter().for_each(|it| _ = insert(&mut store, &shape, it));
    let row = &iterations[0].map[0];
    let share = top_k(row, 8).iter().map(|expert| row[*expert as usize]).sum();
    let (mut errors, mut scores) = (Errors { share, ..Errors::default() }, Vec::new());
    for new in &iterations {
        let mut trajectory = Trajectory::new(&store);
        for (layer, probs) in new.map.iter().enumerate() {
            trajectory.push(&store, layer as u32, probs);
            trajectory.scores(&mut scores);
            for (old, score) in iterations.iter().zip(&scores) {
                let error = f64::from(*score) - trajectory_similarity(new, old, layer + 1);
                match layer {
                    0 => errors.first = errors.first.max(error.abs()),
                    47 => {
                        errors.all = errors.all.max(error.abs());
                        errors.all_rms += error * error / 400.0;
                    }
                    _ => {}
                }
            }
        }
    }
    errors.all_rms = errors.all_rms.sqrt();
    errors
}

/// From peaked to nearly flat.
#[test]
fn trajectories_compare_as_if_they_were_whole() {
    for (peak, bounds) in
        [(2.5, [0.015, 0.003, 0.001]), (1.5, [0.05, 0.015, 0.008]), (0.5, [0.05, 0.03, 0.02])]
    {
        let Errors { first, all, all_rms, share } = trajectory_errors(128, peak);
        eprintln!("{share:.2}: {first:.4} {all:.4} {all_rms:.4}");
        assert!(first < bounds[0] && all < bounds[1] && all_rms < bounds[2], "{peak}");
    }
    // All are kept: only rounding is left.
    let Errors { first, all, .. } = trajectory_errors(8, 1.5);
    assert!(first < 0.003 && all < 0.001, "{first} {all}");
}

fn sketched(a: &[f32], b: &[f32]) -> f64 {
    let mut sketch = Sketch::default();
    sketch.set(a);
    let (mut stored, mut scores) = (Sketches::with_capacity(1), Vec::new());
    stored.put(0, &sketch);
    sketch.set(b);
    stored.scores(&sketch, &mut scores);
    f64::from(scores[0])
}

#[test]
fn embeddings_keep_their_cosine() {
    for len in [1, 64, DIMS, 2048, 5000] {
        let mut squares = 0.0;
        let pairs: Vec<(u64, u64)> =
            (0..20).flat_map(|i| [(i, i), (i, i + 1), (i, i + 100)]).collect();
        for &(a, b) in &pairs {
            let (x, y) = (embedding(a, len), embedding(b, len));
            let error = sketched(&x, &y) - cosine(&x, &y);
            let bound = match (a == b, len <= DIMS) {
                (true, _) => 1e-6,
                (_, true) => 0.01,
                (_, false) => 0.2,
            };
            assert!(error.abs() <= bound, "{len} values, {a} {b}: {error}");
            squares += error * error / pairs.len() as f64;
        }
        eprintln!("{len} values: root mean square error {:.4}", squares.sqrt());
        assert!(squares.sqrt() < 1.2 / (DIMS as f64).sqrt());
    }
    // What all coordinates have in common does not add up.
    let shifted = |seed| embedding(seed, 5000).iter().map(|x| x + 0.3).collect::<Vec<_>>();
    let (a, b) = (shifted(1), shifted(101));
    assert!((sketched(&a, &b) - cosine(&a, &b)).abs() < 0.1);
    assert_eq!(sketched(&[], &[1.0]), 0.0);
    assert_eq!(sketched(&[0.0; 4], &[1.0]), 0.0);
    assert_eq!(sketched(&[f32::NAN, 1.0], &[f32::INFINITY]), 0.0);
}

/// §6.8: 32K maps of a large model in less than 200 MB.
#[test]
fn maps_are_small() {
    let shape = Shape::of_model(vec![128; 48], 8);
    let bytes = MapStore::new(&shape, 32 << 10, 3).bytes();
    assert!(bytes <= 200_000_000, "{bytes}");
    // And that is all they ever have.
    let shape = Shape::of_model(vec![128; 3], 8);
    let mut store = MapStore::new(&shape, 20, 3);
    let bytes = store.bytes();
    for seed in 0..30 {
        insert(&mut store, &shape, &iteration(&shape, seed, 1.0));
    }
    assert_eq!((store.len(), store.bytes()), (20, bytes));
}
