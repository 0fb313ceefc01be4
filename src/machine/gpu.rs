//! Whether there is a GPU's driver: its kernel part and its library, for when one of the two is
//! missing. What GPUs do is in `device`.

use super::text;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// The NVIDIA driver's version line.
    pub driver: Option<String>,
    pub libcuda: Option<PathBuf>,
}

const LIBRARY: &str = "libcuda.so.1";

/// The default folders of loaders, and the one that has the library in Windows' Linux.
const FOLDERS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
    "/usr/lib/wsl/lib",
];

impl Gpu {
    pub fn find() -> Gpu {
        let told = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let folders = std::env::split_paths(&told).chain(FOLDERS.iter().map(PathBuf::from));
        let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
        let candidates = folders.map(|folder| folder.join(LIBRARY)).chain(cached(&cache));
        Gpu {
            driver: version(&text("/proc/driver/nvidia/version")),
            libcuda: candidates.into_iter().find(|path| path.exists()),
        }
    }
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54  …`
fn version(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
    Some(line.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The library's paths in the loader's cache, which has them as text that ends with a zero.
fn cached(cache: &[u8]) -> Vec<PathBuf> {
    let texts = cache.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
    let paths = texts.filter(|text| text.starts_with('/')).map(Path::new);
    paths.filter(|path| path.ends_with(LIBRARY)).map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_says_its_version() {
        let text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC version:\n";
        let expected = "NVIDIA UNIX x86_64 Kernel Module 550.54.15 Tue";
        assert_eq!(version(text).as_deref(), Some(expected));
        assert_eq!(version(""), None);
    }

    #[test]
    fn the_loaders_cache_names_paths() {
        let cache = b"glibc-ld.so.cache1.1\0\xff\x01libcuda.so.1\0/opt/x/libcuda.so.1\0\
                      /opt/libcuda.so.10\0";
        assert_eq!(cached(cache), [PathBuf::from("/opt/x/libcuda.so.1")]);
        assert!(cached(b"").is_empty());
    }
}
