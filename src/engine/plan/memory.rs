//! The system's available memory.

use super::cgroup::{self, Read};
use std::path::Path;

/// Bytes that new work can use without pushing out anything but page cache: `MemAvailable` of
/// /proc/meminfo, or what the limits of this process's control groups leave if that is less.
/// `None` where the system does not say.
pub fn available_bytes() -> Option<u64> {
    available(&|path| std::fs::read_to_string(path).ok())
}

/// The least of the memory limits of this process's control groups. `None` where no group has one.
pub fn group_limit_bytes() -> Option<u64> {
    cgroup::limit(&|path| std::fs::read_to_string(path).ok())
}

fn available(read: Read<'_>) -> Option<u64> {
    let machine = read(Path::new("/proc/meminfo")).and_then(|text| parse(&text));
    machine.into_iter().chain(cgroup::room(read)).min()
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_linux_writes() {
        assert_eq!(parse("MemTotal: 9 kB\nMemAvailable:   123 kB\n"), Some(123 * 1024));
        assert_eq!(parse("MemTotal: 9 kB\n"), None);
        assert_eq!(parse("MemAvailable: many kB\n"), None);
    }

    #[test]
    fn the_tighter_of_machine_and_group_counts() {
        let system = |kib: u64, max: &'static str| {
            move |path: &Path| {
                Some(match path.to_str()? {
                    "/proc/meminfo" => format!("MemAvailable: {kib} kB\n"),
                    "/proc/self/cgroup" => "0::/a\n".into(),
                    "/proc/self/mountinfo" => "1 0 0:1 / /cg rw - cgroup2 cgroup2 rw\n".into(),
                    "/cg/a/memory.max" => max.into(),
                    "/cg/a/memory.current" => "1024\n".into(),
                    _ => return None,
                })
            }
        };
        assert_eq!(available(&system(100, "max\n")), Some(100 << 10));
        assert_eq!(available(&system(100, "51200\n")), Some(49 << 10));
        assert_eq!(available(&system(10, "51200\n")), Some(10 << 10));
        assert_eq!(available(&|_| None), None);
    }
}
