//! Random models of cards against llama.cpp or transformers, which computed the logits in
//! `tests/golden/cards` with an f32 cache (`tests/golden/make_cards.py`).

use common::{argmax, cards, convert_golden, golden_options, load};
use moeba::model::descriptor::Descriptor;
use std::path::Path;

/// Mean squared error, divided by the mean square of what is expected.
pub fn error(got: &[f32], expected: &[f32]) -> f64 {
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        got.iter().zip(expected).map(|(a, b)| of(f64::from(*a), f64::from(*b))).sum()
    };
    sum(&|a, b| (a - b).powi(2)) / sum(&|_, b| b.powi(2))
}

/// Files of the models go to `MOEBA_CARDS`, if it names a folder, for a reference to compute on.
fn keep(path: &Path) {
    if let Some(folder) = std::env::var_os("MOEBA_CARDS") {
        std::fs::copy(path, Path::new(&folder).join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn logits_are_those_of_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for name in cards::names() {
        let path = convert_golden(&name, "f32", dir.path());
        keep(&path);
        let (tokens, expected) = cards::expected(&name);
        let mut session = load(&path, &golden_options()).new_session().unwrap();
        let mut got = Vec::new();
        session.eval_all(&tokens, &mut |_, l| got.extend_from_slice(&l[..cards::N_IDS])).unwrap();
        let error = error(&got, &expected);
        eprintln!("{name}: {error:.1e}");
        let best = |all: &[f32]| all.chunks_exact(cards::N_IDS).map(argmax).collect::<Vec<_>>();
        // llama.cpp rounds GELU to f16, and keys and values of flash attention, which it needs to
        // choose blocks.
        let rounds = ["gemma4", "grok", "minimax-m3"].contains(&name.as_str());
        let bound = if rounds { 1e-6 } else { 1e-8 };
        if error > bound || best(&got) != best(&expected) {
            wrong.push(format!("{name}: {error:.1e}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn every_architecture_compared_with_llama_cpp_has_a_card() {
    let cards = cards::names();
    for descriptor in Descriptor::all() {
        let name = &descriptor.architecture;
        let wanted = descriptor.about.compared_with == "llama.cpp";
        assert_eq!(cards.iter().any(|card| card == name), wanted, "{name}");
    }
}
