//! The PTX in the tree is that of the kernels in the tree. Making it takes NVIDIA's compiler
//! (`kernels/build_ptx.py`, which leaves a digest of the sources); seeing that it is old does not.
//! Where `MOEBA_PTX_PYTHON` names a Python that has the compiler, it is made again and compared.

use moeba::backend::cuda::MODULES;
use moeba::backend::gpu::Emulated;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// Kernel files by stem.
fn sources() -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(kernels()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "cu")).collect();
    files.sort();
    let stem = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
    files.into_iter().map(|path| (stem(&path), path)).collect()
}

/// As `digest` of build_ptx.py: the file and the headers of ours that it includes, breadth first.
fn digest(source: &Path) -> String {
    let mut found: Vec<PathBuf> = Vec::new();
    let mut pending = std::collections::VecDeque::from([source.canonicalize().unwrap()]);
    let mut hash = Sha256::new();
    while let Some(file) = pending.pop_front() {
        if found.contains(&file) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        hash.update(text.as_bytes());
        for line in text.lines() {
            let name = line.strip_prefix("#include \"").and_then(|l| l.strip_suffix('"'));
            let Some(name) = name.filter(|name| name.ends_with(".cuh")) else { continue };
            let near = [file.parent().unwrap().join(name), kernels().join(name)];
            pending.push_back(near.iter().find_map(|path| path.canonicalize().ok()).unwrap());
        }
        found.push(file);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_source_has_its_ptx() {
    let sources = sources();
    let stems: BTreeSet<&str> = sources.iter().map(|(stem, _)| stem.as_str()).collect();
    let built: BTreeSet<&str> = MODULES.iter().map(|(stem, _)| of_source(stem).0).collect();
    let again = "run kernels/build_ptx.py";
    assert_eq!(built, stems, "{again}");
    for (stem, source) in &sources {
        let expected = format!("// kernels/{stem}.cu, sources sha256 {}", digest(source));
        for (_, ptx) in MODULES.iter().filter(|(module, _)| of_source(module).0 == stem) {
            assert_eq!(ptx.lines().next(), Some(expected.as_str()), "{again}");
        }
    }
}

/// The source of a module, and the compute capability that it is for.
fn of_source(module: &str) -> (&str, u32) {
    match module.split_once(".sm_") {
        Some((stem, sm)) => (stem, sm.parse().unwrap()),
        None => (module, 75),
    }
}

/// A variant has all kernels of its file.
#[test]
fn variants_are_whole() {
    let n_kernels = |text: &str| text.matches("\n.visible .entry ").count();
    let variants = MODULES.iter().filter(|(module, _)| of_source(module).1 != 75);
    for (module, text) in variants.clone() {
        let for_all = MODULES.iter().find(|(stem, _)| *stem == of_source(module).0).unwrap();
        assert_eq!(n_kernels(text), n_kernels(for_all.1), "{module}");
    }
    assert!(variants.count() > 0);
}

#[test]
fn ptx_and_emulation_have_the_same_kernels() {
    let entries = |text: &'static str| {
        let lines = text.lines().filter_map(|line| line.strip_prefix(".visible .entry "));
        lines.map(|line| line.trim_end_matches('(').to_owned())
    };
    let built: BTreeSet<String> = MODULES.iter().flat_map(|(_, text)| entries(text)).collect();
    let names = Emulated::kernel_names().into_iter();
    let emulated: BTreeSet<String> = names.filter(|name| !name.starts_with("probe_")).collect();
    assert_eq!(built, emulated);
    assert!(built.len() >= 11, "{built:?}");
}

#[test]
fn the_ptx_loads_where_cuda_12_does() {
    for (stem, text) in MODULES {
        let says = |line: &str| text.lines().any(|l| l == line);
        let target = format!(".target sm_{}", of_source(stem).1);
        assert!(says(".version 8.0") && says(&target), "{stem}");
        // A function without a body would be looked for, in vain, when the driver compiles it.
        assert!(!text.contains(".extern .func"), "{stem}");
    }
}

/// As the compiler makes it, too, and ptxas finds no kernel that spills or that has more registers
/// than its largest block can have.
#[test]
fn the_compiler_makes_the_same_ptx() {
    let Some(python) = std::env::var_os("MOEBA_PTX_PYTHON") else {
        eprintln!(
            "skipped: no MOEBA_PTX_PYTHON, which .ci/run sets, so digests are compared alone"
        );
        return;
    };
    let script = kernels().join("build_ptx.py");
    let out = Command::new(python).arg(script).arg("--check").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (table, faults) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{faults}");
    let n_rows = |(module, text): &(&str, &str)| {
        let n_architectures = if of_source(module).1 == 75 { 3 } else { 2 };
        n_architectures * text.matches("\n.visible .entry ").count()
    };
    let n_rows: usize = MODULES.iter().map(n_rows).sum();
    assert_eq!(table.lines().count(), 1 + n_rows, "{table}");
}
