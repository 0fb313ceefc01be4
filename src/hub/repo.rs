//! References to models: `user/repo`, `user/repo:quant`, or one file of a repository by its name;
//! and the addresses of these in a browser.

use super::names;
use std::fmt;

/// The most bytes of a name on the hub.
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

/// The path behind the hub's name in an address, `https://huggingface.co/` or `hf.co/`.
fn path_of_address(text: &str) -> Option<&str> {
    let text = text.strip_prefix("https://").or(text.strip_prefix("http://")).unwrap_or(text);
    ["huggingface.co/", "hf.co/"].iter().find_map(|host| text.strip_prefix(host))
}

/// Whether this is an address of the hub, which no file's name is.
pub fn is_address(text: &str) -> bool {
    path_of_address(text).is_some()
}

impl Wanted {
    /// `USER/REPO`, `USER/REPO:QUANT`, or the address of a repository or of one of its files.
    pub fn parse(text: &str) -> Result<Wanted, String> {
        let Some(path) = path_of_address(text) else { return Wanted::parse_name(text) };
        let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
        let ends = path.match_indices('/').map(|(at, _)| at).nth(1).unwrap_or(path.len());
        let (name, rest) = path.split_at(ends);
        let wanted = Wanted::parse_name(name)?;
        // What is behind the name: /tree/main, or /blob/main/FILE.
        let mut parts = rest.splitn(4, '/').skip(1);
        match (parts.next(), parts.next(), parts.next()) {
            (None, ..) | (Some("tree"), Some("main"), _) => Ok(wanted),
            (Some("blob" | "resolve"), Some("main"), Some(file)) => wanted.with_file(file),
            _ => Err(format!("expected the address of a repository or of its file, got {text:?}")),
        }
    }

    fn parse_name(text: &str) -> Result<Wanted, String> {
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
                Err(format!("expected a type such as Q4_K_M after the colon, got {text:?}"))
            }
            quant => Ok(Wanted { repo, quant: quant.map(Into::into), file: None }),
        }
    }

    /// A file of this name in the repository.
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
    fn addresses_of_the_hub_are_names() {
        for (text, name) in [
            ("https://huggingface.co/a/b", "a/b"),
            ("https://huggingface.co/a/b/", "a/b"),
            ("http://hf.co/a/b:Q8_0", "a/b:Q8_0"),
            ("hf.co/a/b", "a/b"),
            ("huggingface.co/a/b/tree/main/Q4_0", "a/b"),
            ("https://huggingface.co/a/b/resolve/main/x/y.gguf?download=true", "a/b/x/y.gguf"),
            ("hf.co/a/b/blob/main/y.gguf", "a/b/y.gguf"),
        ] {
            assert!(is_address(text), "{text}");
            assert_eq!(Wanted::parse(text).unwrap().to_string(), name, "{text}");
        }
        for bad in ["hf.co/a", "hf.co/a/b/blob/main", "hf.co/a/b/x", "https://x.org/a/b", "hf.co/"]
        {
            assert!(Wanted::parse(bad).is_err(), "{bad}");
        }
        assert!(!is_address("https://x.org/a/b") && !is_address("a/b"));
    }

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
