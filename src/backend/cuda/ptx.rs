//! The kernels as PTX: `kernels/ptx`, which `kernels/build_ptx.py` writes.

use crate::backend::gpu::Version;
use flate2::read::GzDecoder;
use std::ffi::{CStr, CString};
use std::io::Read;
use std::sync::OnceLock;

/// The PTX of one `kernels/*.cu`.
pub struct Module {
    /// The stem of the source: `rope` for `kernels/rope.cu`.
    pub source: &'static str,
    /// The oldest compute capability that it runs on, 75 for 7.5.
    pub compute: u32,
    /// SHA-256 of the source and its headers.
    pub digest: &'static str,
    pub kernels: &'static [&'static str],
    pub gzip: &'static [u8],
}

/// All modules, ordered by source and compute capability.
pub const MODULES: &[Module] = include!("../../../kernels/ptx/modules.rs");

/// The PTX of `MODULES[at]`. It is inflated on the first call and kept.
pub fn text(at: usize) -> &'static CStr {
    static TEXTS: [OnceLock<CString>; MODULES.len()] = [const { OnceLock::new() }; MODULES.len()];
    TEXTS[at].get_or_init(|| {
        let mut text = Vec::new();
        let inflated = GzDecoder::new(MODULES[at].gzip).read_to_end(&mut text);
        inflated.expect("the tracked files are whole");
        CString::new(text).expect("PTX has no zero bytes")
    })
}

/// The module to load for a kernel on a device of this compute capability: among those that have
/// the kernel and run on the device, the one for the newest devices.
pub fn module_of(kernel: &str, compute: Version) -> Option<usize> {
    let fits = |at: &usize| {
        let module = &MODULES[*at];
        module.compute <= 10 * compute.major + compute.minor && module.kernels.contains(&kernel)
    };
    (0..MODULES.len()).filter(fits).max_by_key(|at| MODULES[*at].compute)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_get_the_newest_module_that_they_run() {
        let module = |kernel, compute| {
            module_of(kernel, compute).map(|at| (MODULES[at].source, MODULES[at].compute))
        };
        for [major, minor] in [[7, 5], [8, 0], [8, 6], [9, 0], [12, 0]] {
            let compute = Version { major, minor };
            assert_eq!(module("rope", compute), Some(("rope", 75)));
            let newest = if major < 8 { 75 } else { 80 };
            assert_eq!(module("attention_prompt_64", compute), Some(("attention_prompt", newest)));
            assert_eq!(module("no_such", compute), None);
        }
    }

    #[test]
    fn a_module_is_inflated_once() {
        assert!(std::ptr::eq(text(0), text(0)));
    }
}
