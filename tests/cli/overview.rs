//! `moeba` alone on a terminal, and the bundled model by its name.

use common::cli::{Tiny, failed, moeba, succeeded, tiny};
use std::fs;

/// The program and the bundled model as an installation has them, under a folder.
fn installed(prefix: &std::path::Path) -> std::process::Command {
    let program = prefix.join("bin/moeba");
    fs::create_dir_all(prefix.join("bin")).unwrap();
    fs::create_dir_all(prefix.join("share/moeba")).unwrap();
    // A copy onto a link would empty the program itself.
    if !program.exists() && fs::hard_link(common::program(), &program).is_err() {
        fs::copy(common::program(), &program).unwrap();
    }
    let model = tiny(Tiny::default());
    fs::copy(&model.path, prefix.join("share/moeba/moeba-demo.gguf")).unwrap();
    let mut command = std::process::Command::new(program);
    for (name, value) in moeba().get_envs() {
        assert!(value.is_none(), "a test's program only has variables less");
        command.env_remove(name);
    }
    command.stdin(std::process::Stdio::null());
    command.env("HF_HUB_CACHE", prefix.join("cache")).current_dir(prefix);
    command
}

#[test]
fn demo_is_the_bundled_model() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = installed(dir.path());
    run.args(["run", "demo", "-p", "hi", "-n", "2", "--temp", "0", "-t", "1"]);
    assert!(succeeded(&run.output().unwrap()).starts_with("hi"));
    // A clone has it in a folder of its own, and a file of this name comes first.
    let elsewhere = tempfile::tempdir().unwrap();
    let inspect = || {
        let mut command = moeba();
        command.args(["inspect", "demo", "--json"]).current_dir(elsewhere.path()).output().unwrap()
    };
    failed(&inspect(), 1, &["demo: no such file", "models/demo/moeba-demo.gguf"]);
    fs::create_dir_all(elsewhere.path().join("models/demo")).unwrap();
    let model = tiny(Tiny::default());
    fs::copy(&model.path, elsewhere.path().join("models/demo/moeba-demo.gguf")).unwrap();
    assert!(succeeded(&inspect()).contains("models/demo/moeba-demo.gguf"));
    fs::copy(&model.path, elsewhere.path().join("demo")).unwrap();
    assert!(!succeeded(&inspect()).contains("moeba-demo.gguf"));
}

#[test]
#[cfg(target_os = "linux")]
fn alone_on_a_terminal_the_program_says_what_can_be_done() {
    use common::terminal::Terminal;
    let dir = tempfile::tempdir().unwrap();
    let command = installed(dir.path());
    let terminal = Terminal::open(command);
    let seen = terminal.see(0, "moeba --help");
    for words in [" core", "memory", "demo", "moeba run demo -p", "moeba serve demo"] {
        assert!(seen.contains(words), "no {words:?} in {seen}");
    }
    assert!(seen.trim_end().lines().count() <= 10, "{seen}");
    assert_eq!(terminal.code(), Some(0));
    // A program that reads the output gets the help, and the exit code of wrong usage.
    let out = installed(dir.path()).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(out.stdout.is_empty() && String::from_utf8_lossy(&out.stderr).contains("Usage:"));
}
