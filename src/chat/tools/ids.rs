//! Ids of calls. They follow from a seed, so that the same request has the same ids.

use super::table::Ids;
use sha2::{Digest, Sha256};

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// `n` letters and digits that follow from `bytes`.
fn digits(bytes: &[u8], n: usize) -> String {
    let hash = Sha256::digest(bytes);
    // 62 divides 256 with a rest of 8: some digits are likelier by a sixteenth part of a percent.
    hash.iter().cycle().take(n).map(|byte| char::from(DIGITS[usize::from(*byte) % 62])).collect()
}

/// The id of call number `index`.
pub fn call_id(ids: Ids, seed: u64, index: usize, name: &str) -> String {
    let mut bytes = seed.to_le_bytes().to_vec();
    bytes.extend((index as u64).to_le_bytes());
    match ids {
        Ids::Long => format!("call_{}", digits(&bytes, 24)),
        Ids::Kimi => format!("functions.{name}:{index}"),
        Ids::Nine => digits(&bytes, 9),
    }
}

/// The id in nine characters: itself if it has them.
pub fn nine(id: &str) -> String {
    if is_nine(id) { id.into() } else { digits(id.as_bytes(), 9) }
}

pub fn is_nine(id: &str) -> bool {
    id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// The name in an id of Kimi's style.
pub fn kimi_name(id: &str) -> Option<&str> {
    let (head, number) = id.rsplit_once(':')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| head.strip_prefix("functions.").unwrap_or(head))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_from_the_seed() {
        let id = call_id(Ids::Long, 7, 0, "f");
        assert_eq!(id, call_id(Ids::Long, 7, 0, "f"));
        assert!(id.len() == 29 && id.starts_with("call_"));
        assert!(id[5..].bytes().all(|byte| byte.is_ascii_alphanumeric()));
        let others = [call_id(Ids::Long, 8, 0, "f"), call_id(Ids::Long, 7, 1, "f")];
        assert!(!others.contains(&id) && others[0] != others[1]);
        assert!(is_nine(&call_id(Ids::Nine, 7, 0, "f")));
        assert_eq!(call_id(Ids::Kimi, 7, 3, "f"), "functions.f:3");
    }

    #[test]
    fn ids_of_other_styles_are_read() {
        assert_eq!(nine("abcDEF123"), "abcDEF123");
        assert!(is_nine(&nine("call_1")) && nine("call_1") != nine("call_2"));
        assert_eq!(kimi_name("functions.get.x:12"), Some("get.x"));
        assert_eq!(kimi_name("f:0"), Some("f"));
        assert_eq!(["functions.f", "f:", "f:x"].map(kimi_name), [None; 3]);
    }
}
