use super::*;

fn options(capacity: usize, distance: usize) -> FineMoeOptions {
    FineMoeOptions { capacity, distance, ..FineMoeOptions::default() }
}

fn saved(seeds: &[u64]) -> (FineMoe, Vec<u8>) {
    let mut predictor = FineMoe::new(&shape(), options(8, 2));
    seeds.iter().for_each(|&seed| run(&mut predictor, 0, &iteration(&shape(), seed, 2.0)));
    let mut profile = Profile::default();
    predictor.save(&mut profile);
    (predictor, profile.get(FineMoe::SECTION).unwrap().to_vec())
}

/// Everything it says of an iteration.
fn says(predictor: &mut FineMoe, iteration: &Iteration) -> Vec<Vec<Prediction>> {
    let mut out = vec![Vec::new(); 4];
    predictor.observe(&start(0, &iteration.embedding));
    predictor.predict(&mut out[0]);
    for (at, (layer, probs)) in MOE_LAYERS.into_iter().zip(&iteration.map).enumerate() {
        predictor.observe(&routed(0, layer, probs));
        predictor.predict(&mut out[at + 1]);
    }
    predictor.observe(&end(0));
    out
}

proptest! {
    #[test]
    fn a_restored_store_goes_on_as_if_nothing_had_been(
        before in prop::collection::vec(0u64..400, 0..12),
        after in prop::collection::vec(0u64..400, 1..6),
    ) {
        let (mut predictor, bytes) = saved(&before);
        let mut restored = FineMoe::restore(&shape(), options(8, 2), &bytes).unwrap();
        for seed in after {
            let iteration = iteration(&shape(), seed, 2.0);
            prop_assert_eq!(says(&mut restored, &iteration), says(&mut predictor, &iteration));
        }
        let (mut a, mut b) = (Profile::default(), Profile::default());
        predictor.save(&mut a);
        restored.save(&mut b);
        prop_assert_eq!(a, b);
    }

    /// A store that is not refused works.
    #[test]
    fn damage_does_no_harm(
        seeds in prop::collection::vec(0u64..400, 0..5),
        at in any::<prop::sample::Index>(),
        value in any::<u8>(),
    ) {
        let (_, mut bytes) = saved(&seeds);
        let at = at.index(bytes.len());
        prop_assert!(FineMoe::restore(&shape(), options(8, 2), &bytes[..at]).is_err());
        bytes[at] = value;
        if let Ok(mut restored) = FineMoe::restore(&shape(), options(8, 2), &bytes) {
            for prediction in says(&mut restored, &iteration(&shape(), 5, 2.0)).concat() {
                let Expert { layer, expert } = prediction.expert;
                prop_assert!((expert as usize) < N_EXPERTS[layer as usize]);
                prop_assert!(prediction.priority.is_finite() && prediction.priority >= 0.0);
            }
        }
        bytes.push(0);
        prop_assert!(FineMoe::restore(&shape(), options(8, 2), &bytes).is_err());
    }

    #[test]
    fn noise_is_refused(bytes in any::<Vec<u8>>()) {
        prop_assert!(FineMoe::restore(&shape(), options(8, 2), &bytes).is_err());
    }
}

/// Maps serve another distance, too.
#[test]
fn a_store_goes_on_with_another_distance() {
    let (_, bytes) = saved(&[1, 2, 3]);
    let seen = iteration(&shape(), 2, 2.0);
    let layers = |distance| {
        let mut restored = FineMoe::restore(&shape(), options(8, distance), &bytes).unwrap();
        assert_eq!(restored.store().len(), 3);
        assert!(restored.verdict().unwrap().contains(&format!("distance {distance},")));
        let at_start = says(&mut restored, &seen).swap_remove(0);
        let mut layers: Vec<u32> = at_start.iter().map(|p| p.expert.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        layers
    };
    for distance in 1..=3 {
        assert_eq!(layers(distance), MOE_LAYERS[..distance]);
    }
}

#[test]
fn another_model_is_refused() {
    let (_, bytes) = saved(&[1, 2, 3]);
    for n_experts in [[0, 6, 40, 0, 10], [6, 0, 40, 0, 9]] {
        let shape = Shape::of_model(n_experts.to_vec(), K);
        let message = FineMoe::restore(&shape, options(8, 2), &bytes).unwrap_err();
        assert_eq!(message, "it belongs to a model of another shape");
    }
    for distance in [0, 4, u32::MAX] {
        let mut bytes = bytes.clone();
        bytes[..4].copy_from_slice(&distance.to_le_bytes());
        let message = FineMoe::restore(&shape(), options(8, 2), &bytes).unwrap_err();
        assert_eq!(message, format!("its prefetch distance of {distance} does not fit 3 layers"));
    }
    // A number of maps that would take all memory.
    let mut many = bytes.clone();
    many[4..8].fill(0xff);
    let message = FineMoe::restore(&shape(), options(8, 2), &many).unwrap_err();
    assert!(message.contains("length"), "{message}");
}

/// Each way in which a row may be broken.
#[test]
fn rows_that_cannot_be_are_refused() {
    let (_, bytes) = saved(&[1]);
    // Of the layer of six experts: scale, rest, ids, levels.
    let row = bytes.len() - (8 + 9 * 3) - (8 + 32 * 3) - (8 + 6 * 3);
    assert!(FineMoe::restore(&shape(), options(8, 2), &bytes).is_ok());
    let nan = f32::NAN.to_le_bytes();
    let negative = (-0.5f32).to_le_bytes();
    let broken: [(usize, &[u8]); 7] = [
        (row, &nan),
        (row, &negative),
        (row, &[0; 8]),
        (row + 4, &nan),
        (row + 4, &negative),
        (row + 8, &[6, 0]),
        (row + 20, &[0, 1]),
    ];
    for (at, value) in broken {
        let mut bytes = bytes.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        let message = FineMoe::restore(&shape(), options(8, 2), &bytes).unwrap_err();
        assert!(message.contains("not probability distributions"), "{at}: {message}");
    }
    let mut twice = bytes.clone();
    twice.copy_within(row + 8..row + 10, row + 10);
    assert!(FineMoe::restore(&shape(), options(8, 2), &twice).is_err());
}

#[test]
fn a_smaller_store_takes_the_first() {
    let (large, bytes) = saved(&[1, 101, 201]);
    let small = FineMoe::restore(&shape(), options(2, 2), &bytes).unwrap();
    assert_eq!(small.store().len(), 2);
    for index in 0..2 {
        let of = |predictor: &FineMoe| stored(predictor.store(), &shape(), index);
        assert_eq!(of(&small), of(&large));
    }
}
