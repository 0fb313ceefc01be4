//! The kernels: PTX, by file.

/// (file's stem, text), of kernels/ptx; build.rs lists the folder.
pub const MODULES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The module that has the kernel of this name.
pub fn module_of(kernel: &str) -> Option<usize> {
    let entry = format!(".entry {kernel}(");
    MODULES.iter().position(|(_, text)| text.contains(&entry))
}
