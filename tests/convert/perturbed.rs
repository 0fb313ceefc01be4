//! Cards with a field of their config changed: the logits that transformers computes, or a refusal
//! that names the field (`tests/golden/perturbed.py`; `perturb.py` here tries every field).

use std::path::Path;

use common::{Npy, cards, moeba, repo};
use serde_json::Value;

const N_TOKENS: usize = 6;
const N_IDS: usize = 32;

/// Sets or removes the fields that a case says; "a/b" descends.
fn edit(config: &mut Value, case: &Value) {
    let set = case["set"].as_object().into_iter().flatten();
    for (path, value) in set {
        let pointer = format!("/{path}");
        match config.pointer_mut(&pointer) {
            Some(field) => *field = value.clone(),
            None => {
                let (outer, last) = pointer.rsplit_once('/').unwrap();
                let outer = config.pointer_mut(outer).expect("what is around the field");
                outer[last] = value.clone();
            }
        }
    }
    for path in case["drop"].as_array().into_iter().flatten() {
        let pointer = format!("/{}", path.as_str().unwrap());
        let (outer, last) = pointer.rsplit_once('/').unwrap();
        let outer = config.pointer_mut(outer).and_then(Value::as_object_mut);
        outer.expect("what is around the field").remove(last).expect("the field");
    }
}

/// The last line of what a command says on stderr, and whether it succeeded.
fn run(args: &[&str]) -> (bool, String) {
    let out = moeba().args(args).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    (out.status.success(), said.lines().last().unwrap_or_default().to_owned())
}

/// The fault of a case, if it has one.
fn fault(case: &Value, wanted: Option<&[f32]>, dir: &Path) -> Option<String> {
    let (folder, out) = (dir.join("checkpoint"), dir.join("out.gguf"));
    cards::checkpoint(case["card"].as_str().unwrap(), &folder);
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut config, case);
    std::fs::write(&path, config.to_string()).unwrap();
    let (folder, out) = (folder.to_str().unwrap(), out.to_str().unwrap());
    let (converted, said) = run(&["convert", folder, "-o", out, "--outtype", "f32", "--force"]);
    let Some(wanted) = wanted else {
        let name = case["refused"].as_str().unwrap();
        let refused = !converted && said.contains(name);
        return (!refused).then(|| format!("not refused for {name}: {said}"));
    };
    if !converted {
        return Some(format!("refused: {said}"));
    }
    let tokens: Vec<String> = (0..24).map(|i| (1 + i * 37 % 255).to_string()).collect();
    let npy = dir.join("logits.npy");
    let (tokens, npy) = (tokens.join(","), npy.to_str().unwrap());
    let caches = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--profile", "none"];
    let args = [&["logits", out, "--tokens", &tokens, "-o", npy], &caches[..]].concat();
    let (computed, said) = run(&args);
    if !computed {
        return Some(format!("converted, and then refused: {said}"));
    }
    let got = Npy::read(Path::new(npy));
    let (n_vocab, got) = (got.shape[1], got.f32s());
    let last = got.len() / n_vocab - N_TOKENS;
    let got = got.chunks(n_vocab).skip(last).flat_map(|row| &row[..N_IDS]);
    let pairs = got.zip(wanted).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let (off, all) =
        pairs.fold((0.0, 0.0), |(off, all), (a, b)| (off + (a - b).powi(2), all + b * b));
    (off / all > 1e-8).then(|| format!("NMSE {:.1e}", off / all))
}

#[test]
fn a_changed_field_changes_the_logits_as_in_transformers_or_is_refused() {
    let golden = repo().join("tests/golden");
    let cases = std::fs::read(golden.join("perturbed.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    let logits = std::fs::read(golden.join("perturbed.f32")).unwrap();
    let logits: Vec<f32> =
        logits.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let mut logits = logits.chunks_exact(N_TOKENS * N_IDS);
    let mut faults = Vec::new();
    for case in &cases {
        let dir = tempfile::tempdir().unwrap();
        let wanted = match case["refused"].is_string() {
            true => None,
            false => Some(logits.next().expect("logits of every case")),
        };
        faults.extend(fault(case, wanted, dir.path()).map(|fault| format!("{case}: {fault}")));
    }
    assert!(logits.next().is_none(), "logits without a case");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
