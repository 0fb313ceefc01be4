//! The profile of distances against predictors that were given each of them.

use super::*;

fn costs(layer_ns: f64, load_ns: f64) -> Costs {
    Costs { attention_ns: layer_ns / 2.0, experts_ns: layer_ns / 2.0, head_ns: 0.0, load_ns }
}

/// Experts that were wanted, those of them that were predicted, and predictions in all.
fn replay(options: FineMoeOptions, iterations: &[Iteration]) -> (usize, usize, usize) {
    let mut predictor = FineMoe::new(&shape(), options);
    let (mut wanted, mut hits, mut n_predicted) = (0, 0, 0);
    let mut out: Vec<Prediction> = Vec::new();
    for iteration in iterations {
        predictor.observe(&start(0, &iteration.embedding));
        for (layer, probs) in MOE_LAYERS.into_iter().zip(&iteration.map) {
            predictor.predict(&mut out);
            let predicted = |expert: u32| out.iter().any(|p| p.expert == Expert { layer, expert });
            let actual = top_k(probs, K);
            wanted += actual.len();
            hits += actual.iter().filter(|expert| predicted(**expert)).count();
            n_predicted += out.iter().filter(|p| p.expert.layer == layer).count();
            predictor.observe(&routed(0, layer, probs));
        }
        predictor.observe(&end(0));
    }
    (wanted, hits, n_predicted)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn a_profile_is_what_predictors_achieve(
        seeds in prop::collection::vec(0u64..400, 1..25),
        use_semantic in any::<bool>(),
        use_delta in any::<bool>(),
    ) {
        let options =
            FineMoeOptions { use_semantic, use_delta, ..FineMoeOptions::default() };
        let iterations: Vec<_> = seeds.iter().map(|&s| iteration(&shape(), s, 3.0)).collect();
        let costs = costs(10.0, 5.0);
        let profile = profile_distances(&shape(), options, &iterations, &costs, 0.5, 7);
        prop_assert_eq!(profile.len(), 3);
        for (distance, at) in (1..).zip(&profile) {
            let options = FineMoeOptions { distance, ..options };
            let (wanted, hits, n_predicted) = replay(options, &iterations);
            prop_assert_eq!(at.distance, distance);
            prop_assert!((at.hit_rate - hits as f64 / wanted as f64).abs() < 1e-12);
            let n_layers = (iterations.len() * 3) as f64;
            prop_assert!((at.n_predicted - n_predicted as f64 / n_layers).abs() < 1e-12);
        }
        let best = best_distance(&profile).unwrap();
        prop_assert!(profile.iter().all(|at| at.stall_ns >= profile[best - 1].stall_ns));
    }
}

/// §6.7: no farther ahead than hides the loads, where embeddings say nothing.
#[test]
fn slow_loads_are_prefetched_farther_ahead() {
    let shape = Shape::of_model(vec![16; 12], K);
    let iterations: Vec<_> = (0..60)
        .map(|i| {
            let embedding = embedding(100 * i, 64);
            Iteration { embedding, ..iteration(&shape, i % 4 * 100 + i, 3.0) }
        })
        .collect();
    let options = FineMoeOptions { use_delta: false, ..FineMoeOptions::default() };
    let profile = |load_ns: f64| {
        profile_distances(&shape, options, &iterations, &costs(100.0, load_ns), 0.2, 10)
    };
    assert!(profile(1.0).is_sorted_by(|a, b| a.hit_rate > b.hit_rate));
    let best = [20.0, 110.0, 250.0].map(|load_ns| best_distance(&profile(load_ns)));
    assert_eq!(best, [Some(1), Some(2), Some(3)]);
    // What the link cannot bring in a layer's time is waited for from any distance.
    let [fast, slow] = [250.0, 1000.0].map(|load_ns| profile(load_ns)[9]);
    let missed = |at: AtDistance, load_ns| 2.0 * (1.0 - at.hit_rate) * 0.2 * load_ns;
    assert!((fast.stall_ns - missed(fast, 250.0)).abs() < 1e-9);
    assert!(slow.stall_ns > missed(slow, 1000.0) + 250.0);
}

#[test]
fn nothing_recorded_is_nothing_known() {
    let profile =
        profile_distances(&shape(), FineMoeOptions::default(), &[], &Costs::default(), 1.0, 2);
    assert_eq!(profile.iter().map(|at| at.hit_rate).sum::<f64>(), 0.0);
    assert_eq!(best_distance(&profile), Some(1));
    assert_eq!(best_distance(&[]), None);
}

#[test]
fn a_distance_comes_back_from_the_profile() {
    let mut profile = Profile::default();
    save_distance(3, &mut profile);
    let bytes = profile.get(DISTANCE_SECTION).unwrap();
    assert_eq!(restore_distance(&shape(), bytes), Ok(3));
    let two = Shape::of_model(vec![8, 0, 8], K);
    let message = restore_distance(&two, bytes).unwrap_err();
    assert_eq!(message, "a prefetch distance of 3 does not fit 2 layers");
    let refused = |bytes: &[u8]| restore_distance(&shape(), bytes).unwrap_err();
    for n in [0, 4, 7] {
        assert_eq!(refused(&bytes[..n]), format!("it has {n} bytes, expected 8"));
    }
    assert_eq!(refused(&[1, 0, 0, 0, 3, 0, 0, 0, 0]), "it has 9 bytes, expected 8");
    assert_eq!(
        refused(&[1, 0, 0, 0, 0, 0, 0, 0]),
        "a prefetch distance of 0 does not fit 3 layers"
    );
    let message = refused(&[7, 0, 0, 0, 3, 0, 0, 0]);
    assert_eq!(message, "it has version 7, this moeba reads version 1");
}
