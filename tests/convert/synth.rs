//! Files with random weights.

use moeba::convert::{PRESETS, preset_header};
use moeba::engine::understand;

/// Four layers have one of each kind.
#[test]
fn every_preset_is_a_model_that_loads() {
    for preset in PRESETS {
        let header = preset_header(preset, Some(4), "q4_k").unwrap();
        let (model, tokenizer) = understand(header, false).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(tokenizer.n_vocab(), model.n_vocab(), "{preset}");
        assert!(model.routed().iter().any(Option::is_some), "{preset}");
    }
}
