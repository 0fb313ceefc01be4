//! Digests, and numbers that follow from bytes.

use sha2::{Digest, Sha256};

pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// A number that is another one for other bytes.
pub fn number_of(hash: &[u8; 32]) -> u64 {
    hash.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_first_digits_of_digests() {
        assert_eq!(number_of(&sha256(b"abc")), 0xba78_16bf_8f01_cfea);
    }
}
