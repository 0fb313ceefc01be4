//! What the system says about memory.

/// Bytes that new work can use without pushing out anything but page cache: `MemAvailable` of
/// /proc/meminfo. `None` where the system does not say.
pub fn available_bytes() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn reads_what_linux_writes() {
        assert_eq!(parse("MemTotal: 9 kB\nMemAvailable:   123 kB\n"), Some(123 * 1024));
        assert_eq!(parse("MemTotal: 9 kB\n"), None);
        assert_eq!(parse("MemAvailable: many kB\n"), None);
    }
}
