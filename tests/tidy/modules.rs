//! One module style: `foo/mod.rs`, no folder for a single file, no `#[path]`.

use super::{ask, report, rust_sources};
use regex::Regex;
use std::collections::{BTreeMap, BTreeSet};

/// Files with a `#[path]`, and why.
const PATHS: &[(&str, &str)] = &[
    ("src/backend/gpu/mod.rs", "the emulated device is among the tests"),
    ("src/lib.rs", "convert/ lies beside src/"),
    ("src/experts/mod.rs", "tests/tier_loom.rs compiles src/experts/tier without its tests"),
    ("tests/pool_loom.rs", "compiles a source with loom's primitives"),
    ("tests/tier_loom.rs", "compiles sources with loom's primitives"),
];

/// Modules beside their folder, and folders of one file. May only get shorter.
const EXCEPTIONS: &[&str] = &["src/cli/chat.rs"];

#[test]
fn modules_have_one_style() {
    let paths: BTreeSet<String> = rust_sources().map(|source| source.path).collect();
    let mut folders = BTreeMap::<&str, BTreeSet<&str>>::new();
    for path in &paths {
        // A folder counts as an entry of the folder that it is in.
        let mut entry = path.as_str();
        while let Some((folder, _)) = entry.rsplit_once('/') {
            folders.entry(folder).or_default().insert(entry);
            entry = folder;
        }
    }
    let mut faults = BTreeMap::new();
    for (folder, entries) in &folders {
        // Packages and targets of their own.
        let has_root = |root: &str| paths.contains(&format!("{folder}/{root}.rs"));
        let is_module = has_root("mod") || folder.matches('/').count() > 1;
        let beside = format!("{folder}.rs");
        if paths.contains(&beside) {
            faults.insert(beside, format!("should be {folder}/mod.rs"));
        } else if is_module && entries.len() == 1 && !folder.starts_with("tests/fuzz") {
            faults.insert((*folder).to_owned(), "a folder for a single file".into());
        }
    }
    for exception in EXCEPTIONS {
        if faults.remove(*exception).is_none() {
            ask(&format!("{exception}: take it off the list in tests/tidy"));
        }
    }
    report(faults.into_iter().map(|(path, text)| format!("{path}: {text}")).collect());
}

#[test]
fn modules_are_where_their_names_say() {
    let attribute = Regex::new(r"(?m)^\s*#!?\[(?:cfg_attr\(.*\b)?path\s*=").unwrap();
    let faulty = rust_sources().filter(|source| {
        let is_listed = PATHS.iter().any(|(path, _)| *path == source.path);
        attribute.is_match(&source.text) && !is_listed
    });
    report(faulty.map(|source| format!("{}: a `path` attribute", source.path)).collect());
}
