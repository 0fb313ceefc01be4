//! Passes the commit to the program. With the feature `emulated` it also compiles kernels/*.cu as
//! C++ against kernels/shim: the emulated GPU that tests use.

use std::fs;
use std::path::Path;
use std::process::Command;

fn main() {
    tell_commit();
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "emulated")]
    emulated::compile().unwrap_or_else(|why| {
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

/// The emulated device of the feature `emulated`.
#[cfg(feature = "emulated")]
mod emulated {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// The files of `dir` with this extension, by name.
    fn files(dir: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
        let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let mut found: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        found.retain(|path| path.extension().is_some_and(|e| e == extension));
        found.sort();
        Ok(found)
    }

    /// Compiles kernels/*.cu as C++ against kernels/shim into the library.
    pub fn compile() -> Result<(), String> {
        println!("cargo:rerun-if-changed=kernels");
        let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
        let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
        let kernels = root.join("kernels");
        let mut build = cc::Build::new();
        // Only fmaf() is a fused multiply-add, as in the PTX.
        build.cpp(true).std("c++17").opt_level(2).flag("-ffp-contract=off").debug(false);
        build.flag("-fno-exceptions").flag("-fno-rtti").cpp_link_stdlib(None);
        // `#pragma unroll` is for NVRTC.
        build.flag("-Wno-unknown-pragmas");
        // For arrays that are filled by a loop of a constant number of iterations.
        build.flag_if_supported("-Wno-maybe-uninitialized");
        let shim = kernels.join("shim");
        build.files(files(&shim, "cc")?);
        // Each file registers its kernels before main. The linker drops files that nothing refers
        // to, so a table refers to all of them.
        let mut declarations = String::new();
        let mut references = String::new();
        let mut sources = files(&kernels, "cu")?;
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
