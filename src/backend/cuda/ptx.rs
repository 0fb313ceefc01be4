//! The kernels as PTX and as machine code: `kernels/ptx`, which `kernels/build_ptx.py` writes.

use crate::backend::gpu::Version;
use lzma_rust2::LzmaReader;
use std::ffi::{CStr, CString};
use std::io::Read;
use std::sync::OnceLock;

/// PTX and machine code of one `kernels/*.cu`.
pub struct Module {
    /// The stem of the source: `rope` for `kernels/rope.cu`.
    pub source: &'static str,
    /// The oldest compute capability that it runs on, 75 for 7.5.
    pub compute: u32,
    /// SHA-256 of the source and its headers.
    pub digest: &'static str,
    /// SHA-256 of the PTX.
    pub ptx: &'static str,
    pub kernels: &'static [&'static str],
    /// The PTX of each module of the source, a zero byte behind it.
    pub lzma: &'static [u8],
    /// Machine code that ptxas has made of the PTX.
    pub cubins: &'static [Cubin],
}

/// Machine code of all kernels of a module.
pub struct Cubin {
    /// The compute capability that runs the code; newer ones of the major version do, too.
    pub compute: u32,
    pub sha256: &'static str,
    pub lzma: &'static [u8],
}

impl Cubin {
    pub fn image(&self) -> Vec<u8> {
        decompress(self.lzma)
    }
}

/// The content of a tracked file. They are in LZMA, which takes half of deflate's room: that looks
/// back 32 KiB, where kernels of one family repeat over a megabyte.
fn decompress(file: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    let reader = LzmaReader::new_mem_limit(file, u32::MAX, None);
    let read = reader.and_then(|mut reader| reader.read_to_end(&mut content));
    read.expect("the tracked files are whole");
    content
}

impl Module {
    /// The machine code for a device of this compute capability. None if it is newer than the
    /// compilers of `kernels/requirements.txt`: then the driver compiles the PTX.
    pub fn cubin(&self, compute: Version) -> Option<&'static Cubin> {
        let (most, major) = (number(compute), compute.major);
        let runs = |cubin: &&Cubin| cubin.compute <= most && cubin.compute / 10 == major;
        self.cubins.iter().filter(runs).max_by_key(|cubin| cubin.compute)
    }
}

/// 75 for 7.5.
fn number(compute: Version) -> u32 {
    10 * compute.major + compute.minor
}

/// All modules, ordered by source and compute capability.
pub const MODULES: &[Module] = include!("../../../kernels/ptx/modules.rs");

/// The PTX of `MODULES[at]`. It is decompressed on the first call and kept.
pub fn text(at: usize) -> &'static CStr {
    static TEXTS: [OnceLock<CString>; MODULES.len()] = [const { OnceLock::new() }; MODULES.len()];
    TEXTS[at].get_or_init(|| {
        let module = &MODULES[at];
        let before = MODULES[..at].iter().filter(|m| m.source == module.source).count();
        let texts = decompress(module.lzma);
        let text = texts.split(|byte| *byte == 0).nth(before).expect("a text for each module");
        CString::new(text).expect("split at zero bytes")
    })
}

/// The PTX of one kernel of `MODULES[at]`, for a device without a cubin: the driver compiles what
/// it is given, so a program's first start compiles the kernels that it uses and no others. None if
/// the module has no such kernel.
pub fn kernel_text(at: usize, kernel: &str) -> Option<CString> {
    let text = text(at).to_str().expect("PTX is ASCII");
    let entry = entry_of(text, kernel)?;
    let rest = outside(text);
    let code: Vec<&str> = rest.iter().copied().filter(|line| variable(line).is_none()).collect();
    let is_used = |name: &str| entry.contains(name) || code.iter().any(|line| line.contains(name));
    let mut out = String::new();
    for line in rest.iter().filter(|line| variable(line).is_none_or(is_used)) {
        out.push_str(line);
        out.push('\n');
    }
    out.push_str(entry);
    CString::new(out).ok()
}

/// The lines of a kernel.
fn entry_of<'a>(text: &'a str, kernel: &str) -> Option<&'a str> {
    let start = text.find(&format!(".visible .entry {kernel}("))?;
    let end = start + text[start..].find("\n}\n")? + "\n}\n".len();
    Some(&text[start..end])
}

/// The lines that belong to no kernel: the header, variables, and functions that kernels call.
fn outside(text: &str) -> Vec<&str> {
    let mut is_outside = true;
    let is_kept = |line: &&str| {
        is_outside &= !line.starts_with(".visible .entry ");
        let is_kept = is_outside;
        is_outside |= *line == "}";
        is_kept
    };
    text.lines().filter(is_kept).collect()
}

/// The name of the variable that a line declares.
fn variable(line: &str) -> Option<&str> {
    let declared = line.strip_prefix(".global ")?.split(['=', ';', '[']).next()?;
    declared.split_whitespace().last()
}

/// The module to load for a kernel on a device of this compute capability: among those that have
/// the kernel and run on the device, the one for the newest devices.
pub fn module_of(kernel: &str, compute: Version) -> Option<usize> {
    let fits = |at: &usize| {
        let module = &MODULES[*at];
        module.compute <= number(compute) && module.kernels.contains(&kernel)
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
    fn each_kernel_can_be_compiled_alone() {
        for (at, module) in MODULES.iter().enumerate() {
            let all = text(at).to_str().unwrap();
            for kernel in module.kernels {
                let text = kernel_text(at, kernel).expect(kernel);
                let text = text.to_str().unwrap();
                assert_eq!(text.matches(".entry ").count(), 1, "{kernel}");
                for part in [".version ", ".target ", ".address_size "] {
                    assert!(text.contains(part), "{kernel}: {part}");
                }
                assert_eq!(text.matches('{').count(), text.matches('}').count(), "{kernel}");
                let entry = entry_of(all, kernel).unwrap();
                assert!(text.ends_with(entry), "{kernel}");
                let declared = all.lines().filter_map(variable).filter(|name| entry.contains(name));
                for name in declared {
                    let line = |line: &str| variable(line) == Some(name);
                    assert!(text.lines().any(line), "{kernel} lacks {name}");
                }
            }
        }
        assert!(kernel_text(0, "no_such").is_none());
    }

    #[test]
    fn a_module_is_decompressed_once() {
        assert!(std::ptr::eq(text(0), text(0)));
    }

    #[test]
    fn devices_get_the_newest_cubin_of_their_major_version() {
        let cubin = |kernel, [major, minor]: [u32; 2]| {
            let compute = Version { major, minor };
            MODULES[module_of(kernel, compute)?].cubin(compute).map(|cubin| cubin.compute)
        };
        let expected = [
            ([7, 5], Some(75)),
            ([8, 0], Some(80)),
            ([8, 6], Some(86)),
            ([8, 7], Some(86)),
            ([8, 9], Some(86)),
            ([9, 0], Some(90)),
            ([10, 0], Some(100)),
            ([10, 3], Some(100)),
            ([11, 0], None),
            ([12, 1], Some(120)),
            ([13, 0], None),
        ];
        for (compute, chosen) in expected {
            for kernel in ["rope", "attention_prompt_64"] {
                assert_eq!(cubin(kernel, compute), chosen, "{compute:?}");
            }
        }
    }
}
