//! The demo model, as a newcomer meets it.

use std::path::PathBuf;
use std::process::Command;

use common::{moeba, repo, succeed};

fn model() -> PathBuf {
    repo().join("models/demo/moeba-demo.gguf")
}

fn run(args: &[&str]) -> Command {
    let mut command = moeba();
    command.arg("run").arg(model()).args(args);
    command
}

/// Greedy text, byte for byte. `tests/fixtures/demo/` holds what the model says; a change of
/// these files is a change of the model or of the arithmetic and needs a reason.
#[test]
fn greedy_text_is_what_it_was() {
    for (name, args) in [
        ("chat", &["-p", "What is a branch?", "-n", "64"][..]),
        ("story", &["-p", "The package manager", "-no-cnv", "-n", "64"][..]),
    ] {
        // The file recommends a penalty, which would hide what the model says by itself.
        let greedy = ["--temp", "0", "--repeat-penalty", "1", "-q"];
        let output = succeed(run(args).args(greedy));
        let expected = repo().join(format!("tests/fixtures/demo/{name}.txt"));
        let expected = std::fs::read(&expected).unwrap_or_else(|e| panic!("{expected:?}: {e}"));
        let (got, expected) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(expected).unwrap());
        assert_eq!(got, expected, "{name}");
    }
}

/// The sampling that the file recommends is in force where no flag says otherwise.
#[test]
fn the_models_own_sampling_is_used() {
    let output = succeed(&mut run(&["-p", "hi", "-n", "1", "-v"]));
    let told = String::from_utf8(output.stderr).unwrap();
    let line = told.lines().find(|line| line.contains("sampling: ")).unwrap();
    for part in ["temp 0.7", "top-p 0.9", "repeat-penalty 1.1"] {
        assert!(line.contains(part), "{line}");
    }
}

/// Promise 1, on the bundled model and through the command line.
#[test]
fn logits_have_the_same_bits_for_any_threads_and_batches() {
    let dir = tempfile::tempdir().unwrap();
    let tokens: Vec<String> = (0..150).map(|i| (i * 53 % 8000 + 3).to_string()).collect();
    let tokens = tokens.join(",");
    let logits = |name: &str, args: &[&str]| {
        let out = dir.path().join(name);
        let mut command = moeba();
        command.arg("logits").arg(model()).args(["--tokens", &tokens, "-o"]).arg(&out).args(args);
        succeed(&mut command);
        std::fs::read(out).unwrap()
    };
    let one = logits("1.npy", &["-t", "1", "-ub", "1"]);
    for (i, args) in [["-t", "2", "-ub", "1"], ["-t", "1", "-ub", "64"], ["-t", "2", "-ub", "64"]]
        .iter()
        .enumerate()
    {
        assert!(logits(&format!("other{i}.npy"), args) == one, "{args:?} changes the logits");
    }
}

/// Bytes of a block of 32 of each quantised type of the KV cache.
const CACHE_TYPES: [(&str, f64); 6] = [
    ("q8_0", 34.0),
    ("q4_0", 18.0),
    ("q4_1", 20.0),
    ("iq4_nl", 18.0),
    ("q5_0", 22.0),
    ("q5_1", 24.0),
];

/// The type of the cache changes the logits and its bytes; threads and batches change neither.
#[test]
fn caches_of_any_type_are_as_large_as_their_blocks_and_keep_the_bits() {
    let dir = tempfile::tempdir().unwrap();
    let tokens: Vec<String> = (0..40).map(|i| (i * 53 % 8000 + 3).to_string()).collect();
    let tokens = tokens.join(",");
    let logits = |ty: &str, more: &[&str]| {
        let out = dir.path().join("logits.npy");
        let mut command = moeba();
        command.arg("logits").arg(model()).args(["-ctk", ty, "-ctv", ty, "--tokens", &tokens]);
        succeed(command.arg("-o").arg(&out).args(more));
        std::fs::read(out).unwrap()
    };
    let exact = logits("f32", &[]);
    for (ty, block_bytes) in CACHE_TYPES {
        let one = logits(ty, &["-t", "1", "-ub", "1"]);
        assert!(one != exact, "{ty} changes nothing");
        assert!(logits(ty, &["-t", "2", "-ub", "17"]) == one, "{ty}: -t 2 -ub 17");
        // Twelve layers with two heads of 64 keys and 64 values.
        let plan = succeed(run(&["--dry-run", "-c", "8192", "-ctk", ty]).args(["-ctv", ty]));
        let plan = String::from_utf8(plan.stdout).unwrap();
        let row = plan.lines().find(|line| line.starts_with("KV cache")).unwrap();
        let mib = 8192.0 * 12.0 * 2.0 * 4.0 * block_bytes / f64::from(1 << 20);
        assert!(row.contains(&format!(" {mib:.1} MiB")), "{ty}, {mib}: {row}");
    }
}

/// Scalar kernels say the same, bit for bit: the specification.
#[test]
fn logits_have_the_same_bits_for_scalar_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let logits = |simd: &str| {
        let out = dir.path().join(simd);
        let mut command = moeba();
        command.env("MOEBA_SIMD", simd).arg("logits").arg(model());
        succeed(command.args(["--tokens", "5,17,1234,999,4000,8,9,10,11,12,13", "-o"]).arg(&out));
        std::fs::read(out).unwrap()
    };
    let want = logits("scalar");
    // What the processor lacks is replaced by what it has.
    for simd in ["avx2", "avx512", "neon", "dotprod"] {
        assert!(logits(simd) == want, "scalar and {simd} differ");
    }
}

/// The bundled file is small, whole and finite.
#[test]
fn the_file_is_sound() {
    let size = std::fs::metadata(model()).unwrap().len();
    assert!(size <= 40_000_000, "{size} bytes");
    succeed(moeba().arg("inspect").arg(model()).arg("--check"));
}
