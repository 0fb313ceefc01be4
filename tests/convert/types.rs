//! Which tensor gets which type: tensor by tensor what llama-quantize chose for the models of
//! tests/fixtures/convert/make_fixtures.py.

use moeba::convert::{Mix, ModelFacts, tensor_type};
use serde_json::Value;

/// `blk.{}.x` in all layers, or the one tensor that the pattern names.
fn named(pattern: &str, n_layers: u64) -> Vec<String> {
    let n = if pattern.contains("{}") { n_layers } else { 1 };
    (0..n).map(|layer| pattern.replace("{}", &layer.to_string())).collect()
}

#[test]
fn types_are_those_that_llama_cpp_chooses() {
    let path = common::repo().join("tests/fixtures/convert/types.json.gz");
    let fixture: Value = serde_json::from_slice(&common::gunzip(&path)).unwrap();
    let mut checked = 0;
    for (model, expected) in fixture.as_object().unwrap() {
        let number = |field: &str| expected[field].as_u64().unwrap();
        let n_layers = number("n_layers");
        let patterns = expected["types"]["q8_0"].as_object().unwrap().keys();
        let names: Vec<String> = patterns.flat_map(|p| named(p, n_layers)).collect();
        // With and without an importance matrix; the former only where that differs.
        for (field, has_imatrix) in [("types", false), ("weighted", true)] {
            let facts = ModelFacts {
                n_layers,
                n_experts: number("n_experts"),
                n_heads: number("n_heads"),
                n_heads_kv: number("n_heads_kv"),
                has_imatrix,
                ..Default::default()
            };
            let facts = facts.with_tensors(names.iter().map(String::as_str));
            for mix in Mix::names().filter(|mix| !["f32", "f16", "bf16"].contains(mix)) {
                let Some(tensors) = expected[field].get(mix).or(expected["types"].get(mix)) else {
                    let is_small = mix == "q2_k_s" || mix.starts_with("iq");
                    // llama-quantize fails where rows are no whole blocks of these.
                    let is_refused = ["q1_0", "q2_0"].contains(&mix)
                        && ["shared_values", "odd_rows"].contains(&model.as_str());
                    assert!(is_small && field == "types" || is_refused, "{model} {mix} {field}");
                    continue;
                };
                let mix = Mix::from_name(mix).unwrap();
                for (pattern, types) in tensors.as_object().unwrap() {
                    let dims = &expected["dims"][pattern.replace("{}", "0")];
                    let dims: Vec<u64> =
                        dims.as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
                    for (ty, layers) in types.as_object().unwrap() {
                        let names = match layers.as_str().unwrap() {
                            "all" => named(pattern, n_layers),
                            some => some.split(' ').map(|n| pattern.replace("{}", n)).collect(),
                        };
                        for name in names {
                            let ours = tensor_type(mix, &facts, &name, &dims);
                            let case = format!("{model} {field} {} {name}", mix.name());
                            assert_eq!(ours.name(), ty, "{case}");
                            checked += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(checked > 50_000, "{checked}");
}
