//! Statistics in a profile. Layout, little-endian: number of layers (u32), decode tokens since the
//! last plan (u64), then for each layer the number of its experts (u32, 0 where it is dense), of
//! its predicted experts that are counted (u32) and all its counts (u32 each): tokens, activations,
//! correct predictions, predictions.
//!
//! The LCP order is not kept: the eviction starts without one as well.

use super::stats::{LayerCounts, Stats};
use super::{Moepic, MoepicOptions};
use crate::policy::Shape;

const U32_BYTES: usize = 4;
/// Numbers before the first layer's, as many u32: one and a u64.
const HEAD: usize = 3;

impl Moepic {
    /// The profile's section with the statistics.
    pub const SECTION: &'static str = "moepic.stats";

    /// Starts with the statistics of an earlier run on the same model. Returns the reason as a
    /// clause, for use after a colon.
    pub fn restore(shape: &Shape, options: MoepicOptions, bytes: &[u8]) -> Result<Moepic, String> {
        let mut moepic = Moepic::new(shape, options);
        let layers = moepic.stats.layers.iter();
        let n: usize = HEAD + layers.map(|layer| 2 + layer.all().count()).sum::<usize>();
        if bytes.len() != n * U32_BYTES {
            return Err(format!("it has {} bytes, expected {}", bytes.len(), n * U32_BYTES));
        }
        let numbers = bytes.chunks_exact(U32_BYTES);
        let mut numbers =
            numbers.map(|bytes| u32::from_le_bytes(bytes.try_into().expect("of 4 bytes")));
        let mut next = || numbers.next().expect("as many as were counted");
        if next() as usize != shape.n_layers() {
            return Err("it has another number of layers".into());
        }
        moepic.tokens = u64::from(next()) | u64::from(next()) << 32;
        moepic.restored = true;
        for (l, layer) in moepic.stats.layers.iter_mut().enumerate() {
            if [next() as usize, next() as usize] != [layer.n_experts(), layer.depth()] {
                return Err(format!("its layer {l} has another number of experts"));
            }
            layer.all_mut().for_each(|count| *count = next());
            check(layer, shape.k).map_err(|what| format!("its layer {l} has {what}"))?;
        }
        // A plan of τ tokens has left half of them.
        if u64::from(moepic.stats.tokens()) >= moepic.options.tau / 2 {
            moepic.gap = moepic.options.tau;
        }
        Ok(moepic)
    }
}

/// Whether these can be counts: the probabilities they make are at most 1.
fn check(layer: &LayerCounts, k: usize) -> Result<(), &'static str> {
    let most = u64::from(layer.tokens);
    let total = |counts: &[u32]| counts.iter().map(|count| u64::from(*count)).sum::<u64>();
    if layer.all().any(|count| u64::from(*count) > most) {
        return Err("more uses of an expert than tokens");
    }
    if total(&layer.activations) > most * k as u64 {
        return Err("more activations than its tokens make");
    }
    let n = layer.n_experts().max(1);
    if layer.predictions.chunks_exact(n).any(|ranks| total(ranks) > most) {
        return Err("more predictions than tokens");
    }
    Ok(())
}

pub(super) fn encode(stats: &Stats, tokens: u64) -> Vec<u8> {
    let mut out = (stats.layers.len() as u32).to_le_bytes().to_vec();
    out.extend(tokens.to_le_bytes());
    for layer in &stats.layers {
        let sizes = [layer.n_experts() as u32, layer.depth() as u32];
        out.extend(sizes.iter().chain(layer.all()).flat_map(|number| number.to_le_bytes()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::papers::moepic::testing::{history, routed, shape};
    use crate::policy::{Event, Phase, Profile, Splitter, Timing};
    use proptest::prelude::*;

    fn saved(moepic: &Moepic) -> Vec<u8> {
        let mut profile = Profile::default();
        moepic.save(&mut profile);
        profile.get(Moepic::SECTION).unwrap().to_vec()
    }

    fn restore(bytes: &[u8]) -> Result<Moepic, String> {
        Moepic::restore(&shape(), MoepicOptions::default(), bytes)
    }

    proptest! {
        #[test]
        fn counts_come_back(history in history()) {
            let mut moepic = Moepic::new(&shape(), MoepicOptions::default());
            for step in &history {
                moepic.observe(&routed(step));
                let (request, timing) = (step.request, Timing::default());
                moepic.observe(&Event::IterationEnd { request, phase: Phase::Decode, timing });
            }
            let bytes = saved(&moepic);
            let back = restore(&bytes).unwrap();
            prop_assert!(back.stats.layers == moepic.stats.layers);
            prop_assert_eq!(back.tokens, history.len() as u64);
            prop_assert_eq!(saved(&back), bytes);
        }

        /// Whatever the bytes, an answer; and what is taken makes probabilities.
        #[test]
        fn damage_is_refused_or_harmless(
            history in history(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut moepic = Moepic::new(&shape(), MoepicOptions::default());
            history.iter().for_each(|step| moepic.observe(&routed(step)));
            let mut bytes = saved(&moepic);
            let at = at.index(bytes.len());
            prop_assert!(restore(&bytes[..at]).is_err());
            bytes[at] = byte;
            if let Ok(back) = restore(&bytes) {
                for layer in &back.stats.layers {
                    prop_assert!(layer.all().all(|count| *count <= layer.tokens));
                }
            }
        }
    }

    #[test]
    fn another_shape_is_refused() {
        let bytes = saved(&Moepic::new(&shape(), MoepicOptions::default()));
        assert!(restore(&bytes).is_ok());
        assert!(restore(&[]).is_err());
        let mut other = shape();
        // As many numbers in another order.
        other.n_experts.swap(1, 2);
        let message = Moepic::restore(&other, MoepicOptions::default(), &bytes).unwrap_err();
        assert_eq!(message, "its layer 1 has another number of experts");
        other.n_experts.push(4);
        other.n_granules.push(4);
        other.class.push(0);
        let message = Moepic::restore(&other, MoepicOptions::default(), &bytes).unwrap_err();
        assert!(message.contains("expected"), "{message}");
    }

    #[test]
    fn impossible_counts_are_refused() {
        let refused = |change: &dyn Fn(&mut LayerCounts)| {
            let mut moepic = Moepic::new(&shape(), MoepicOptions::default());
            let layer = &mut moepic.stats.layers[1];
            layer.tokens = 10;
            change(layer);
            restore(&saved(&moepic)).map(|_| ()).unwrap_err()
        };
        let message = refused(&|layer| layer.correct[0] = 11);
        assert_eq!(message, "its layer 1 has more uses of an expert than tokens");
        let message = refused(&|layer| layer.activations[..3].fill(10));
        assert_eq!(message, "its layer 1 has more activations than its tokens make");
        let message = refused(&|layer| layer.predictions[7..9].fill(6));
        assert_eq!(message, "its layer 1 has more predictions than tokens");
    }
}
