//! The number of tokens that a model was evaluated on and not trained on, beside the model in the
//! profile: the last ones of its samples. Comparisons of predictors use only these.
//!
//! Layout, little-endian: version (u32), tokens (u64).

use crate::policy::Profile;

const VERSION: u32 = 1;

pub const HELD_OUT_SECTION: &str = "prescope.held-out";

pub fn save_held_out(n_tokens: usize, profile: &mut Profile) {
    let mut bytes = VERSION.to_le_bytes().to_vec();
    bytes.extend((n_tokens as u64).to_le_bytes());
    profile.set(HELD_OUT_SECTION, bytes);
}

/// Returns the reason as a clause, for use after a colon.
pub fn restore_held_out(bytes: &[u8]) -> Result<usize, String> {
    let parts = bytes.split_first_chunk().filter(|(_, rest)| rest.len() == size_of::<u64>());
    let (version, rest) = parts.ok_or(format!("it has {} bytes, expected 12", bytes.len()))?;
    let version = u32::from_le_bytes(*version);
    if version != VERSION {
        return Err(format!("it has version {version}, this moeba reads version {VERSION}"));
    }
    let n_tokens = u64::from_le_bytes(rest.try_into().expect("of 8 bytes"));
    usize::try_from(n_tokens).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_comes_back_and_nothing_else_does() {
        let mut profile = Profile::default();
        save_held_out(4301, &mut profile);
        let bytes = profile.get(HELD_OUT_SECTION).unwrap();
        assert_eq!(restore_held_out(bytes), Ok(4301));
        for n in [0, 3, 11] {
            let message = restore_held_out(&bytes[..n]).unwrap_err();
            assert_eq!(message, format!("it has {n} bytes, expected 12"));
        }
        let mut other = bytes.to_vec();
        other[0] = 2;
        let message = restore_held_out(&other).unwrap_err();
        assert_eq!(message, "it has version 2, this moeba reads version 1");
    }
}
