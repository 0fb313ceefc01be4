//! Golden checkpoints with LoRA adapters against peft (`tests/golden/make_adapters.py`).

use crate::cards::error;
use common::{adapters, argmax, cards, golden, golden_options, load};
use moeba::convert::{ConvertOptions, Mix, convert};

#[test]
fn merged_adapters_give_the_logits_of_peft() {
    let mut wrong = Vec::new();
    for name in adapters::names() {
        let dir = tempfile::tempdir().unwrap();
        let card = adapters::card(&name);
        let (adapter, output) = (dir.path().join("adapter"), dir.path().join("merged.gguf"));
        adapters::write(&name, &card, &adapter);
        let options = ConvertOptions {
            folder: golden(card["base"].as_str().unwrap()),
            output: output.clone(),
            mix: Some(Mix::F32),
            lora: vec![adapter],
            ..ConvertOptions::default()
        };
        convert(&options).unwrap();
        let (tokens, expected) = cards::logits_in(&adapters::folder(), &name);
        let mut session = load(&output, &golden_options()).new_session().unwrap();
        let mut got = Vec::new();
        session.eval_all(&tokens, &mut |_, l| got.extend_from_slice(&l[..cards::N_IDS])).unwrap();
        let error = error(&got, &expected);
        eprintln!("{name}: {error:.1e}");
        let best = |all: &[f32]| all.chunks_exact(cards::N_IDS).map(argmax).collect::<Vec<_>>();
        if error > 1e-8 || best(&got) != best(&expected) {
            wrong.push(format!("{name}: {error:.1e}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
