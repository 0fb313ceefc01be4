//! The graphs of a token that is decoded layer by layer: how many operations a layer has.

use crate::support::choice;
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::{EngineOptions, TestHooks, Want};

/// One operation looks up the chosen experts, outside of the graph.
const LOOK_UP: usize = 1;

/// Operations of a layer in the middle, before its experts and from there on.
const LAYERS: [(&str, &str, [usize; 2]); 6] = [
    ("qwen3moe", "f32", [9, 3]),
    ("qwen3moe", "q8_0", [9, 4]),
    ("olmoe", "q8_0", [11, 4]),
    ("gpt_oss", "q8_0", [9, 4]),
    ("glm4moe", "q8_0", [13, 4]),
    ("qwen3next", "q8_0", [19, 3]),
];

#[test]
fn a_decoded_layer_has_few_operations() {
    let dir = tempfile::tempdir().unwrap();
    for (name, ty, expected) in LAYERS {
        let path = convert_golden(name, ty, dir.path());
        let device = choice(Config::default());
        let test = TestHooks { by_layer: true, ..Default::default() };
        let options = EngineOptions { device, test, n_ctx: Some(40), ..golden_options() };
        let engine = load(&path, &options);
        let mut session = engine.new_session().unwrap();
        session.eval(&[3, 4, 5], Want::Last).unwrap();
        session.eval(&[6], Want::Last).unwrap();
        let nodes = engine.graph_counts().unwrap().nodes;
        let all: Vec<usize> = nodes.iter().map(|[a, b]| a + b + LOOK_UP).collect();
        eprintln!("{name} over {ty}: {nodes:?}, {all:?} in all");
        assert_eq!(nodes[nodes.len() - 1], expected, "{name} over {ty}");
    }
}
