//! The PTX and the cubins in the tree belong to the kernels in the tree. Compiling them takes
//! NVIDIA's compilers; digests in `kernels/ptx/modules.rs` show without them when one is old. Where
//! `MOEBA_PTX_PYTHON` names a Python that has them, everything is compiled again and compared.

use moeba::backend::cuda::{Cubin, MODULES, Module, ptx_text};
use moeba::backend::gpu::{Emulated, LAYOUTS, Layout};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// The kernels' sources by stem.
fn sources() -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(kernels()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "cu")).collect();
    files.sort();
    let stem = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
    files.into_iter().map(|path| (stem(&path), path)).collect()
}

/// As `digest` of build_ptx.py: the file and our headers that it includes, breadth first.
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
    hex(hash)
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::new_with_prefix(bytes))
}

/// Says how to repair the folder.
const AGAIN: &str = "run kernels/build_ptx.py, after a merge too: what is old is made again";

/// Each module with its PTX.
fn modules() -> impl Iterator<Item = (&'static Module, &'static str)> {
    MODULES.iter().enumerate().map(|(at, module)| (module, ptx_text(at).to_str().unwrap()))
}

/// The names of the entries of a PTX text, in order.
fn entries(text: &str) -> Vec<&str> {
    let lines = text.lines().filter_map(|line| line.strip_prefix(".visible .entry "));
    lines.map(|line| line.trim_end_matches('(')).collect()
}

#[test]
fn every_source_has_its_ptx() {
    let sources = sources();
    let stems: BTreeSet<&str> = sources.iter().map(|(stem, _)| stem.as_str()).collect();
    let built: BTreeSet<&str> = MODULES.iter().map(|module| module.source).collect();
    assert_eq!(built, stems, "{AGAIN}");
    for (stem, source) in &sources {
        let digest = digest(source);
        for module in MODULES.iter().filter(|module| module.source == stem) {
            assert_eq!(module.digest, digest, "{stem}: {AGAIN}");
        }
    }
}

/// The table names the kernels that the PTX has.
#[test]
fn the_table_is_that_of_the_ptx() {
    for (module, text) in modules() {
        let Module { source, compute, .. } = module;
        assert_eq!(module.ptx, sha256(text.as_bytes()), "{source}: {AGAIN}");
        assert_eq!(entries(text), module.kernels, "{source}");
        assert_eq!(text.lines().next().unwrap(), format!("// kernels/{source}.cu"));
        let target = format!(".target sm_{compute}");
        assert!(text.lines().any(|line| line == target), "{source}: no {target}");
    }
    let mut order: Vec<_> = MODULES.iter().map(|m| (m.source, m.compute)).collect();
    order.dedup();
    assert!(order.is_sorted() && order.len() == MODULES.len(), "{order:?}");
}

/// The files of the folder are those of the table.
#[test]
fn no_file_is_left_over() {
    let files = fs::read_dir(kernels().join("ptx")).unwrap();
    let paths = files.map(|file| file.unwrap().path());
    let found: BTreeSet<Vec<u8>> = paths
        .filter(|path| path.extension().is_some_and(|e| e != "rs"))
        .map(|path| fs::read(path).unwrap())
        .collect();
    let cubins = |module: &'static Module| module.cubins.iter().map(|cubin| cubin.lzma.to_vec());
    let of = |module: &'static Module| std::iter::once(module.lzma.to_vec()).chain(cubins(module));
    assert_eq!(found, MODULES.iter().flat_map(of).collect());
}

/// The kernels of a cubin, sorted: the sections of an ELF file that hold code.
fn entries_of_elf(elf: &[u8]) -> Vec<String> {
    let number = |at: usize, bytes: usize| {
        let little = elf[at..at + bytes].iter().rev();
        little.fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    assert_eq!(&elf[..5], b"\x7fELF\x02");
    let (table, size, n, names) = (number(40, 8), number(58, 2), number(60, 2), number(62, 2));
    let section = |i: usize| table + i * size;
    let names = number(section(names) + 24, 8);
    let name = |i: usize| {
        let bytes = &elf[names + number(section(i), 4)..];
        let end = bytes.iter().position(|byte| *byte == 0).unwrap();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    };
    let mut found: Vec<String> =
        (0..n).filter_map(|i| Some(name(i).strip_prefix(".text.")?.to_owned())).collect();
    found.sort();
    found
}

/// A cubin is the one that was made of the PTX, for its device, and has the same kernels.
#[test]
fn cubins_are_those_of_the_ptx() {
    for module in MODULES {
        let mut kernels: Vec<String> = module.kernels.iter().map(ToString::to_string).collect();
        kernels.sort();
        for cubin in module.cubins {
            let Cubin { compute, .. } = cubin;
            let (image, what) = (cubin.image(), format!("{} for {compute}", module.source));
            assert_eq!(sha256(&image), cubin.sha256, "{what}: {AGAIN}");
            assert_eq!(entries_of_elf(&image), kernels, "{what}");
            // The version that the first drivers of these devices know, and the device.
            let flags = u32::from_le_bytes(image[48..52].try_into().unwrap());
            let expected = if *compute < 100 { (7, flags & 0xff) } else { (8, flags >> 8 & 0xff) };
            assert_eq!((u32::from(image[8]), *compute), expected, "{what}: {flags:#x}");
        }
    }
}

/// For each device one module has the cubin.
#[test]
fn every_source_has_its_cubins() {
    for (stem, _) in sources() {
        let modules = MODULES.iter().filter(|module| module.source == stem);
        let mut computes: Vec<u32> =
            modules.flat_map(|module| module.cubins).map(|cubin| cubin.compute).collect();
        computes.sort_unstable();
        assert_eq!(computes, [75, 80, 86, 90, 100, 120], "{stem}");
    }
}

/// A variant has all kernels of its source.
#[test]
fn variants_are_whole() {
    let variants = MODULES.iter().filter(|module| module.compute != 75);
    for variant in variants.clone() {
        let is_base = |m: &&Module| m.source == variant.source && m.compute == 75;
        let base = MODULES.iter().find(is_base).unwrap();
        assert_eq!(variant.kernels, base.kernels, "{}", variant.source);
    }
    assert!(variants.count() > 0);
}

#[test]
fn ptx_and_emulation_have_the_same_kernels() {
    let kernels = MODULES.iter().flat_map(|module| module.kernels);
    let built: BTreeSet<String> = kernels.map(ToString::to_string).collect();
    let names = Emulated::kernel_names().into_iter();
    let emulated: BTreeSet<String> = names.filter(|name| !name.starts_with("probe_")).collect();
    assert_eq!(built, emulated);
    assert!(built.len() >= 11, "{built:?}");
}

#[test]
fn the_ptx_loads_where_cuda_12_does() {
    for (module, text) in modules() {
        assert!(text.lines().any(|line| line == ".version 8.0"), "{}", module.source);
        // The driver cannot compile a function without a body.
        assert!(!text.contains(".extern .func"), "{}", module.source);
    }
}

/// The fields of each `struct XParams` of a source: type and name, one a line.
fn structs(text: &str) -> Vec<(String, Vec<(String, String)>)> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let name = line.strip_prefix("struct ").and_then(|l| l.strip_suffix(" {"));
        let Some(name) = name.filter(|name| name.ends_with("Params")) else { continue };
        let body = lines.by_ref().take_while(|line| *line != "};");
        let code = body.map(|line| line.split("//").next().unwrap().trim().to_owned());
        let fields = code.filter(|line| !line.is_empty()).map(|line| {
            let (ty, field) = line.strip_suffix(';').unwrap().rsplit_once(' ').unwrap();
            (ty.to_owned(), field.to_owned())
        });
        found.push((name.to_owned(), fields.collect()));
    }
    found
}

/// Checks a struct of the kernels against the one of the same name in Rust: a field that is
/// missing, swapped with another or of another type is a fault.
fn compare(name: &str, fields: &[(String, String)], layout: &Layout) -> Result<(), String> {
    let mut offset = 0;
    if fields.len() != layout.fields.len() {
        return Err(format!("{name}: {} and {} fields", fields.len(), layout.fields.len()));
    }
    for ((ty, field), rust) in fields.iter().zip(layout.fields) {
        let expected = match rust.ty {
            "DevicePtr" => ty.starts_with("Address<"),
            "f32" => ty == "float",
            same => ty == same,
        };
        if field != rust.name || !expected || rust.offset != offset {
            return Err(format!("{name}: {ty} {field} at {offset}, but {rust:?}"));
        }
        offset += rust.size;
    }
    if offset == layout.size { Ok(()) } else { Err(format!("{name} has padding")) }
}

#[test]
fn parameters_are_the_same_in_rust_and_in_kernels() {
    let dirs = [kernels(), kernels().join("shim")];
    let files = dirs.iter().flat_map(|dir| fs::read_dir(dir).unwrap());
    let paths = files.map(|file| file.unwrap().path());
    let sources = paths.filter(|path| path.extension().is_some_and(|e| e == "cu" || e == "cuh"));
    let texts: Vec<String> = sources.map(|path| fs::read_to_string(path).unwrap()).collect();
    let mut seen = BTreeSet::new();
    for text in &texts {
        for (name, fields) in structs(text) {
            let layout = LAYOUTS.iter().find(|layout| layout.name == name);
            let layout = layout.unwrap_or_else(|| panic!("{name} is not in LAYOUTS"));
            compare(&name, &fields, layout).unwrap();
            let size = format!("static_assert(sizeof({name}) == {});", layout.size);
            assert!(text.contains(&size), "{name}: {size}");
            assert!(seen.insert(layout.name), "{name} is defined twice");
            // Two fields swapped are found.
            for i in 1..fields.len() {
                let mut swapped = fields.clone();
                swapped.swap(i - 1, i);
                compare(&name, &swapped, layout).unwrap_err();
            }
        }
    }
    assert_eq!(seen, LAYOUTS.iter().map(|layout| layout.name).collect());
}

/// The parameters of each entry of a PTX text, as their sizes.
fn entry_parameters(text: &str) -> Vec<(&str, Vec<usize>)> {
    let entries = text.split(".visible .entry ").skip(1);
    let parameters = entries.map(|entry| {
        let (name, rest) = entry.split_once("(\n").unwrap();
        let lines = rest.lines().take_while(|line| *line != ")");
        let sizes = lines.map(|line| match line.trim().split(' ').nth(1) {
            Some(".u64") => 8,
            Some(".u32" | ".f32") => 4,
            other => panic!("{name} has a parameter of type {other:?}"),
        });
        (name, sizes.collect())
    });
    parameters.collect()
}

/// A kernel of the PTX has a parameter for each field of its struct.
#[test]
fn parameters_of_the_ptx_are_the_fields() {
    for (_, text) in modules() {
        for (kernel, sizes) in entry_parameters(text) {
            let (params, size) = Emulated::kernel_params(kernel).unwrap();
            let layout = LAYOUTS.iter().find(|layout| layout.name == params).unwrap();
            let expected: Vec<usize> = layout.fields.iter().map(|field| field.size).collect();
            assert_eq!((sizes, size), (expected, layout.size), "{kernel}");
        }
    }
}

/// The compiler makes the same PTX again, and ptxas finds no kernel that spills or that has more
/// registers than its largest block can have.
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
    // Behind the head, a row for each architecture and each kernel: seven in one target or another.
    let bases = MODULES.iter().filter(|module| module.compute == 75);
    let n_kernels: usize = bases.map(|module| module.kernels.len()).sum();
    assert_eq!(table.lines().count(), 1 + 7 * n_kernels, "{table}");
}
