//! Files with random weights.

use std::path::Path;

use common::{moeba, repo, succeed};
use moeba::convert::{PRESETS, preset_header};
use moeba::engine::understand;
use moeba::trace::Reuse;
use moeba::trace::format::Trace;

/// Six layers have one of each kind.
#[test]
fn every_preset_is_a_model_that_loads() {
    for preset in PRESETS {
        let header = preset_header(preset, Some(6), "q4_k").unwrap();
        let (model, tokenizer) = understand(header, false).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(tokenizer.n_vocab(), model.n_vocab(), "{preset}");
        assert!(model.routed().iter().any(Option::is_some), "{preset}");
    }
}

/// The routing of a text in a layer of 32 experts, 8 of them a token.
fn reuse(folder: &Path, routing: &str) -> Reuse {
    let (model, trace) = (folder.join("synth.gguf"), folder.join("synth.mtrace"));
    let mut synth = moeba();
    synth.args(["synth", "granite-3.0-1b-a400m", "--layers", "1", "--force", "--routing", routing]);
    succeed(synth.arg("-o").arg(&model));
    let mut record = moeba();
    record.args(["trace", "record", "--requests", "4", "-p", "48", "-n", "1", "--force"]);
    record.arg("-f").arg(repo().join("README.md")).arg("-o").arg(&trace).arg(&model);
    succeed(&mut record);
    Reuse::of(&Trace::open(&trace).unwrap())
}

#[test]
fn routers_choose_as_they_are_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let [uniform, skewed, sticky] =
        ["uniform", "skewed", "sticky"].map(|routing| reuse(folder.path(), routing));
    let all = format!("{uniform:?} {skewed:?} {sticky:?}");
    // A token would use a quarter again by chance.
    assert!((0.2..0.32).contains(&uniform.of_last_token), "{all}");
    assert!(skewed.of_hottest_quarter > uniform.of_hottest_quarter + 0.04, "{all}");
    assert!(sticky.of_last_token > uniform.of_last_token + 0.08, "{all}");
}
