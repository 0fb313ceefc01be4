//! Embeddings on the emulated device: those of the CPU, with all layers there or some.

use crate::support::choice;
use common::{convert_golden, golden_options, load};
use moeba::backend::gpu::emulated::Config;
use moeba::engine::{EngineOptions, Pooling};

#[test]
fn embeddings_are_those_of_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + i * i) % 300 + 3).collect();
    for name in ["qwen3moe", "qwen3next"] {
        let path = convert_golden(name, "f32", dir.path());
        let base = EngineOptions { n_ctx: Some(64), ..golden_options() };
        let on_device = |seed| EngineOptions {
            device: choice(Config { seed, ..Config::default() }),
            ..base.clone()
        };
        let placements = [
            ("all", on_device(1)),
            ("in parts", EngineOptions { n_ubatch: Some(16), ..on_device(2) }),
            ("two layers", EngineOptions { gpu_layers: Some(2), ..on_device(3) }),
        ];
        for pooling in [Pooling::None, Pooling::Mean, Pooling::Cls, Pooling::Last] {
            let of = |options: &EngineOptions| {
                load(&path, options).new_session().unwrap().embed(&tokens, pooling).unwrap()
            };
            let expected = of(&base);
            let largest = expected.values.iter().fold(0f32, |most, v| most.max(v.abs()));
            for (what, options) in &placements {
                let got = of(options);
                assert_eq!(got.values.len(), expected.values.len(), "{name}, {what}");
                let off = got.values.iter().zip(&expected.values).map(|(a, b)| (a - b).abs());
                let worst = off.fold(0f32, f32::max);
                let is_near = worst <= 1e-3 * largest;
                assert!(is_near, "{name}, {what}, {pooling:?}: off by {worst} of {largest}");
            }
        }
    }
}
