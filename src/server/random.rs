//! Numbers that differ from run to run: seeds and names.

use std::hash::{BuildHasher, Hasher, RandomState};

/// 32 bits, as people write seeds.
pub fn seed() -> u64 {
    number() >> 32
}

fn number() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A name that begins with `prefix`, as `chatcmpl-7Hq…`.
pub fn name(prefix: &str) -> String {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut name = prefix.to_owned();
    for _ in 0..3 {
        let mut n = number();
        for _ in 0..8 {
            name.push(char::from(DIGITS[(n % 62) as usize]));
            n /= 62;
        }
    }
    name
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_and_seeds_are_short() {
        let (a, b) = (name("x-"), name("x-"));
        assert_ne!(a, b);
        assert_eq!(a.len(), 26);
        assert!(seed() <= u64::from(u32::MAX));
    }
}
