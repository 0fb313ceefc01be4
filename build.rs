//! Lists kernels/ptx for the library, notes the commit, and under the feature `emulated` compiles
//! kernels/*.cu as C++ against kernels/shim: the emulated GPU that tests use.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    tell_commit();
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let kernels = root.join("kernels");
    list_ptx(&kernels.join("ptx"), &out);
    #[cfg(feature = "emulated")]
    emulated::compile(&kernels, &out).unwrap_or_else(|why| {
        eprintln!("the feature `emulated` needs a C++ compiler: {why}");
        std::process::exit(1);
    });
}

/// Sets MOEBA_COMMIT to the commit of the clone that a release is built from, unless it is set. In
/// other profiles nothing is set, so that a commit does not build and link all tests again.
fn tell_commit() {
    println!("cargo:rerun-if-env-changed=MOEBA_COMMIT");
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    if !is_release || std::env::var_os("MOEBA_COMMIT").is_some() {
        return;
    }
    // The folder's own clone, not one that this folder is a part of.
    let Ok(head) = fs::read_to_string(".git/HEAD") else { return };
    println!("cargo:rerun-if-changed=.git/HEAD");
    if let Some(branch) = head.trim().strip_prefix("ref: ") {
        // A branch that has no file of its own is in packed-refs.
        let file = format!(".git/{branch}");
        let file = if Path::new(&file).exists() { &file } else { ".git/packed-refs" };
        println!("cargo:rerun-if-changed={file}");
    }
    let git = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
    if let Ok(output) = git
        && output.status.success()
    {
        let commit = String::from_utf8_lossy(&output.stdout);
        println!("cargo:rustc-env=MOEBA_COMMIT={}", commit.trim());
    }
}

/// Files of `dir` with this extension, by name.
fn files(dir: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut found: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    found.retain(|path| path.extension().is_some_and(|e| e == extension));
    found.sort();
    Ok(found)
}

/// Writes the list of the folder's files, (stem, text), that src/backend/cuda/ptx.rs includes.
fn list_ptx(ptx: &Path, out: &Path) {
    let mut list = String::from("&[\n");
    for file in files(ptx, "ptx").unwrap_or_default() {
        let stem = file.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        list += &format!("    ({stem:?}, include_str!({file:?})),\n");
    }
    fs::write(out.join("ptx.rs"), list + "]\n").expect("the build's folder can be written");
}

/// The emulated device of the feature `emulated`.
#[cfg(feature = "emulated")]
mod emulated {
    use super::files;
    use std::fs;
    use std::path::Path;

    /// Compiles kernels/*.cu as C++ against kernels/shim into the library.
    pub fn compile(kernels: &Path, out: &Path) -> Result<(), String> {
        let mut build = cc::Build::new();
        // Sums are fused where a kernel says so and nowhere else, as in the PTX.
        build.cpp(true).std("c++17").opt_level(2).flag("-ffp-contract=off").debug(false);
        build.flag("-fno-exceptions").flag("-fno-rtti").cpp_link_stdlib(None);
        // `#pragma unroll` is for the GPU.
        build.flag("-Wno-unknown-pragmas");
        // Arrays that a loop of a constant number of turns fills.
        build.flag_if_supported("-Wno-maybe-uninitialized");
        let shim = kernels.join("shim");
        build.files(files(&shim, "cc")?);
        // A kernel's file registers its kernels before main, if it is linked: for that, something must
        // refer to it.
        let mut declarations = String::new();
        let mut references = String::new();
        let mut sources = files(kernels, "cu")?;
        sources.extend(files(&shim, "cu")?);
        for source in sources {
            let stem = source.file_stem().and_then(|s| s.to_str()).unwrap_or_default().to_owned();
            let anchor = format!("shim_file_{stem}");
            let text = format!("extern \"C\" {{ int {anchor} = 1; }}\n#include {:?}\n", source);
            let wrapper = out.join(format!("{stem}.cc"));
            fs::write(&wrapper, text).map_err(|e| format!("{}: {e}", wrapper.display()))?;
            build.file(wrapper);
            declarations += &format!("extern int {anchor};\n");
            references += &format!("    &{anchor},\n");
        }
        let table = out.join("kernels.cc");
        let text = format!(
            "extern \"C\" {{\n{declarations}extern int* const shim_files[];\n\
             int* const shim_files[] = {{\n{references}    nullptr,\n}};\n}}\n"
        );
        fs::write(&table, text).map_err(|e| format!("{}: {e}", table.display()))?;
        build.file(table).try_compile("moeba_kernels").map_err(|e| e.to_string())
    }
}
