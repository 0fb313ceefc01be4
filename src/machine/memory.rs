//! Memory and its pages, as the system describes them.

use super::text;

/// `None` or 0 for what the system does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    pub total_bytes: Option<u64>,
    pub swap_bytes: Option<u64>,
    pub swap_free_bytes: Option<u64>,
    /// Size of a huge page, and how many are set aside for those who ask for them by name.
    pub huge_page_bytes: Option<u64>,
    pub n_huge_pages: u64,
    /// The users of transparent huge pages: `always`, `madvise` (as moeba) or `never`.
    pub transparent_huge_pages: Option<String>,
}

impl Memory {
    pub fn read() -> Memory {
        let transparent = text("/sys/kernel/mm/transparent_hugepage/enabled");
        Memory::parse(&text("/proc/meminfo"), &transparent)
    }

    fn parse(meminfo: &str, transparent: &str) -> Memory {
        let number = |key: &str| -> Option<u64> {
            let line =
                meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
            line.trim().trim_end_matches("kB").trim().parse().ok()
        };
        let bytes = |key: &str| number(key)?.checked_mul(1024);
        // `always [madvise] never`
        let chosen = transparent.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        Memory {
            total_bytes: bytes("MemTotal"),
            swap_bytes: bytes("SwapTotal"),
            swap_free_bytes: bytes("SwapFree"),
            huge_page_bytes: bytes("Hugepagesize"),
            n_huge_pages: number("HugePages_Total").unwrap_or(0),
            transparent_huge_pages: chosen.map(|(chosen, _)| chosen.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_by_their_whole_key() {
        let meminfo = "MemTotal:       1000 kB\nMemTotalX: 5 kB\nHugePages_Total:       3\n\
                       SwapTotal: 7 kB\nSwapFree: 0 kB\n\
                       Hugepagesize:       2048 kB\n";
        let expected = Memory {
            total_bytes: Some(1000 << 10),
            swap_bytes: Some(7 << 10),
            swap_free_bytes: Some(0),
            huge_page_bytes: Some(2 << 20),
            n_huge_pages: 3,
            transparent_huge_pages: Some("madvise".into()),
        };
        assert_eq!(Memory::parse(meminfo, "always [madvise] never\n"), expected);
        assert_eq!(Memory::parse("MemTotal: much\n", ""), Memory::default());
    }
}
