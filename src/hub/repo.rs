//! What a user asks for: `user/repo`, `user/repo:quant`, or one file of a repository by its name.

use super::names;
use std::fmt;

/// Longer names are none of the hub's.
const MAX_BYTES: usize = 256;

/// `user/repo`, fit to be part of a URL and of a folder's name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RepoId {
    user: String,
    name: String,
}

impl RepoId {
    /// The error says what was expected.
    pub fn parse(text: &str) -> Result<RepoId, String> {
        let wrong = || format!("expected USER/REPO, got {text:?}");
        let (user, name) = text.split_once('/').ok_or_else(wrong)?;
        if text.len() > MAX_BYTES || !is_part(user) || !is_part(name) {
            return Err(wrong());
        }
        Ok(RepoId { user: user.into(), name: name.into() })
    }

    pub fn user(&self) -> &str {
        &self.user
    }

    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.user, self.name)
    }
}

/// The hub's rule: letters, digits, `_`, and between those single `.` and `-`. Two dashes would end
/// the user in a folder's name.
fn is_part(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let known = text.chars().all(|c| word(c) || c == '.' || c == '-');
    let doubled = text.contains("--") || text.contains("..");
    known && !doubled && text.starts_with(word) && text.ends_with(word)
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub repo: RepoId,
    /// `Q4_K_M`; absent: the usual one.
    pub quant: Option<String>,
    /// The file itself, whatever its name says of its type.
    pub file: Option<String>,
}

impl Wanted {
    /// `USER/REPO` or `USER/REPO:QUANT`.
    pub fn parse(text: &str) -> Result<Wanted, String> {
        let (repo, quant) = match text.split_once(':') {
            Some((repo, quant)) => (repo, Some(quant)),
            None => (text, None),
        };
        let repo = RepoId::parse(repo)
            .map_err(|_| format!("expected USER/REPO or USER/REPO:QUANT, got {text:?}"))?;
        let is_quant =
            |q: &str| !q.is_empty() && q.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        // Names of quants have dashes, too: UD-Q4_K_XL.
        let is_quant = |q: &str| q.split(['-', '.']).all(is_quant);
        match quant {
            Some(quant) if !is_quant(quant) => {
                Err(format!("expected a type such as Q4_K_M behind the colon, got {text:?}"))
            }
            quant => Ok(Wanted { repo, quant: quant.map(Into::into), file: None }),
        }
    }

    /// The same repository's file of this name.
    pub fn with_file(mut self, file: &str) -> Result<Wanted, String> {
        if !names::is_safe_path(file) {
            return Err(format!("expected a file's name inside the repository, got {file:?}"));
        }
        self.file = Some(file.into());
        Ok(self)
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.repo)?;
        match (&self.file, &self.quant) {
            (Some(file), _) => write!(f, "/{file}"),
            (None, Some(quant)) => write!(f, ":{quant}"),
            (None, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_a_user_and_a_name() {
        for good in ["a/b", "Qwen/Qwen3-30B-A3B-GGUF", "user_1/x.y-z", "0/1"] {
            assert_eq!(RepoId::parse(good).unwrap().to_string(), good);
        }
        let long = format!("a/{}", "b".repeat(300));
        for bad in [
            "", "a", "a/", "/b", "a/b/c", "../b", "a/..", "a/b..c", "a--b/c", "-a/b", "a/b-",
            "a b/c", "a/b\n", "a/b?x", "a/b%2f", "é/b", &long,
        ] {
            assert!(RepoId::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_quant_stands_behind_a_colon() {
        let wanted = Wanted::parse("a/b:UD-Q4_K_XL").unwrap();
        assert_eq!(wanted.quant.as_deref(), Some("UD-Q4_K_XL"));
        assert_eq!(wanted.to_string(), "a/b:UD-Q4_K_XL");
        assert_eq!(Wanted::parse("a/b").unwrap().quant, None);
        for bad in ["a/b:", "a/b:q:r", "a/b:q/r", "a/b:-", "a/b: Q4", "a:Q4"] {
            assert!(Wanted::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_file_lies_inside_its_repository() {
        let wanted = || Wanted::parse("a/b").unwrap();
        assert_eq!(wanted().with_file("sub/x.gguf").unwrap().to_string(), "a/b/sub/x.gguf");
        assert!(wanted().with_file("../x.gguf").is_err());
    }
}
