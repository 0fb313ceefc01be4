//! Runs the comparison with gguf-rs, which lives in a package of its own because of what it turns
//! on in serde_json (`tests/gguf-oracle/README.md`).

mod common;

use std::process::Command;

#[test]
fn gguf_rs_reads_what_we_read() {
    let cargo = std::env::var_os("CARGO").expect("cargo runs the tests");
    let manifest = common::repo().join("tests/gguf-oracle/Cargo.toml");
    let mut command = Command::new(cargo);
    // A target folder of its own: cargo holds a lock on the one that this test was built in.
    command.args(["test", "--locked", "--manifest-path"]).arg(manifest);
    command.env("CARGO_TARGET_DIR", common::repo().join("target/gguf-oracle"));
    let output = common::succeed(&mut command);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("test result: ok. "), "{stdout}");
}
