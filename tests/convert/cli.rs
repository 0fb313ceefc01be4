//! The commands as users call them: exit codes, one sentence on stderr, nothing on stdout.

use assert_cmd::Command;
use common::golden;

/// Runs with these arguments; answers the exit code and what stderr has.
fn moeba(args: &[&str]) -> (i32, String) {
    let output = Command::cargo_bin("moeba").unwrap().args(args).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn convert_quantize_and_their_complaints() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let (f32_file, q8_file) = (path("a.gguf"), path("b.gguf"));
    let checkpoint = golden("qwen3moe").to_string_lossy().into_owned();

    let (code, said) = moeba(&["convert", &checkpoint, "-o", &f32_file, "--outtype", "F32"]);
    assert!(code == 0 && said.contains("39 tensors"), "{code}: {said}");
    let (code, said) = moeba(&["quantize", &f32_file, &q8_file, "Q8_0", "-vv"]);
    assert!(code == 0 && said.contains("token_embd.weight"), "{code}: {said}");
    assert!(said.contains("from F32") && said.contains(" MiB to "), "{said}");

    let (code, said) = moeba(&["quantize", &q8_file, &path("c.gguf"), "q4_0"]);
    assert!(code == 1 && said.lines().count() == 1, "{code}: {said}");
    let (code, said) = moeba(&["quantize", &f32_file, &f32_file, "q4_0"]);
    assert!(code == 2 && said.lines().count() == 1, "{code}: {said}");
    let (code, said) = moeba(&["convert", &path("none"), "-o", &path("c.gguf")]);
    assert!(code == 1 && said.lines().count() == 1 && said.contains("none"), "{code}: {said}");
    for wrong in [
        &["convert", checkpoint.as_str()][..],
        &["convert", &checkpoint, "-o", &f32_file, "--outtype", "q9"],
        &["quantize", &f32_file, &q8_file, "q9_k"],
        &["quantize", &f32_file, &q8_file, "NVFP4"],
        &["quantize", &f32_file, &q8_file, "f8_e4m3"],
        &["convert", &checkpoint, "-o", &f32_file, "--outtype", "iq2_xxs"],
        &["synth", "gpt", "-o", &f32_file],
        &["synth", "mixtral-8x7b", "-o", &f32_file, "--layers", "0"],
        &["synth", "mixtral-8x7b", "-o", &f32_file, "--layers", "99"],
    ] {
        let (code, said) = moeba(wrong);
        assert_eq!(code, 2, "{wrong:?}: {said}");
    }
    assert!(!std::path::Path::new(&path("c.gguf")).exists());
}
