//! The package that `cargo publish` would send: what the program is compiled from, and no more.

use super::{report, sources};
use flate2::{Compression, write::GzEncoder};
use regex::Regex;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The limit of crates.io.
const MAX_BYTES: usize = 10 << 20;

/// The rules of `include`, each a path from the root with `*` and `**`.
fn rules(root: &Path) -> Vec<Regex> {
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let (_, list) = manifest.split_once("\ninclude = [").expect("Cargo.toml has `include`");
    let (list, _) = list.split_once(']').unwrap();
    let quoted = Regex::new(r#""/([^"]+)""#).unwrap();
    let rules = quoted.captures_iter(list).map(|found| {
        let rule = regex::escape(&found[1]).replace(r"\*\*", ".+").replace(r"\*", "[^/]*");
        Regex::new(&format!("^{rule}$")).unwrap()
    });
    rules.collect()
}

fn files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true if path.ends_with("target") || path.ends_with(".git") => {}
            true => files(&path, out),
            false => out.push(path),
        }
    }
}

/// The path of a file that `name` is relative to, without `..`.
fn beside(source: &str, name: &str) -> String {
    let mut folders: Vec<&str> = source.split('/').collect();
    folders.pop();
    for part in name.split('/') {
        if part == ".." {
            folders.pop();
        } else {
            folders.push(part);
        }
    }
    folders.join("/")
}

#[test]
fn the_package_has_what_is_compiled_in_and_is_small() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let rules = rules(root);
    let is_packed = |path: &str| rules.iter().any(|rule| rule.is_match(path));
    let mut all = Vec::new();
    files(root, &mut all);
    let mut archive = GzEncoder::new(Vec::new(), Compression::default());
    let mut faults = Vec::new();
    let mut n_files = 0;
    for path in all {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
        if !is_packed(&name) {
            continue;
        }
        n_files += 1;
        let for_clones = ["tests/", "findings/", "models/demo/"];
        let is_device = name.starts_with("tests/emulator/");
        if for_clones.iter().any(|folder| name.starts_with(folder)) && !is_device {
            faults.push(format!("{name}: is packed, and only a clone needs it"));
        }
        archive.write_all(&fs::read(&path).unwrap()).unwrap();
    }
    assert!(n_files > 500, "{n_files} files are packed");
    let n_bytes = archive.finish().unwrap().len();
    if n_bytes > MAX_BYTES {
        faults.push(format!("the package has {n_bytes} bytes, at most {MAX_BYTES}"));
    }
    let included = Regex::new(r#"include(?:_str|_bytes)?!\("([^"]+)"\)"#).unwrap();
    let module = Regex::new(r#"#\[path = "([^"]+)"\]"#).unwrap();
    for source in sources().iter().filter(|source| source.is_rust() && is_packed(&source.path)) {
        let program = source.program();
        let found = included.captures_iter(program).map(|found| found[1].to_owned());
        let modules = module.captures_iter(program).map(|found| found[1].to_owned());
        for name in found.chain(modules) {
            let needed = beside(&source.path, &name);
            if !is_packed(&needed) {
                faults.push(format!("{}: needs {needed}, which is not packed", source.path));
            }
        }
    }
    report(faults);
}
