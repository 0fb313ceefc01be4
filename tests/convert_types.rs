//! Which tensor gets which type: tensor by tensor what llama-quantize chose for the models of
//! tests/fixtures/convert/make_fixtures.py.

use moeba::convert::{Mix, ModelFacts, tensor_type};
use serde_json::Value;

#[test]
fn types_are_those_that_llama_cpp_chooses() {
    let fixture: Value = serde_json::from_str(include_str!("fixtures/convert/types.json")).unwrap();
    let mut checked = 0;
    for (model, expected) in fixture.as_object().unwrap() {
        let number = |field: &str| expected[field].as_u64().unwrap();
        let facts = ModelFacts {
            architecture: "llama".into(),
            n_layers: number("n_layers"),
            n_experts: number("n_experts"),
            n_heads: number("n_heads"),
            n_heads_kv: number("n_heads_kv"),
            has_output: expected["dims"].get("output.weight").is_some(),
        };
        for (mix, tensors) in expected["types"].as_object().unwrap() {
            let mix = Mix::from_name(mix).unwrap();
            for (pattern, types) in tensors.as_object().unwrap() {
                let dims = &expected["dims"][pattern.replace("{}", "0")];
                let dims: Vec<u64> =
                    dims.as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
                for (ty, layers) in types.as_object().unwrap() {
                    for layer in layers.as_str().unwrap().split(' ') {
                        let name = pattern.replace("{}", layer);
                        let ours = tensor_type(mix, &facts, &name, &dims);
                        assert_eq!(ours.name(), ty, "{model} {} {name}", mix.name());
                        checked += 1;
                    }
                }
            }
        }
    }
    assert!(checked > 5000, "{checked}");
}
