//! Names of files, from servers and in the cache. They are not trusted: a name must not lead out of
//! its folder.

/// Longest name of a file that is taken, in bytes.
const MAX_PATH_BYTES: usize = 1024;

/// Whether a file of this name lies below the folder it is looked for in, on every system.
pub fn is_safe_path(path: &str) -> bool {
    path.len() <= MAX_PATH_BYTES && path.split('/').all(is_safe_part)
}

fn is_safe_part(part: &str) -> bool {
    let special = |c: char| c.is_control() || matches!(c, '\\' | ':' | '\u{202a}'..='\u{202e}');
    !part.is_empty() && part != "." && part != ".." && !part.contains(special)
}

/// A commit's name: a SHA-1 in lower-case hexadecimal.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && is_hex(text)
}

/// The name of a file's content: Git's SHA-1, or the SHA-256 of a large file.
pub fn is_object_id(text: &str) -> bool {
    is_commit(text) || is_sha256(text)
}

pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && is_hex(text)
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_in_their_folder() {
        for good in ["a.gguf", "Q4_K_M/model-00001-of-00002.gguf", ".gitattributes", "a..b", "ü b"]
        {
            assert!(is_safe_path(good), "{good:?}");
        }
        let long = "a".repeat(2000);
        for bad in [
            "",
            "/etc/passwd",
            "../a",
            "a/../b",
            "a/..",
            "..",
            ".",
            "./a",
            "a//b",
            "a/",
            "a\\..\\b",
            "C:/a",
            "C:a",
            "a\nb",
            "a\0b",
            "a\u{202e}b",
            &long,
        ] {
            assert!(!is_safe_path(bad), "{bad:?}");
        }
    }

    #[test]
    fn ids_are_hexadecimal_of_one_length() {
        assert!(is_commit(&"0a".repeat(20)) && is_sha256(&"f9".repeat(32)));
        assert!(is_object_id(&"0a".repeat(20)) && is_object_id(&"f9".repeat(32)));
        for bad in ["", "main", "../../x", &"0A".repeat(20), &"0g".repeat(20), &"0".repeat(41)] {
            assert!(!is_object_id(bad), "{bad:?}");
        }
    }
}
