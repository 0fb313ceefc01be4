//! The folders in which the hub's programs keep files (Hugging Face's documentation, "Understand
//! caching"):
//!
//! ```text
//! CACHE/models--USER--REPO/blobs/ETAG              contents, each once
//!                          snapshots/COMMIT/PATH   links to them
//!                          refs/main               the commit that the branch was last seen at
//! CACHE/.locks/models--USER--REPO/ETAG.lock        held while a blob is written
//! ```

use super::RepoId;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The branch that is read, as llama.cpp does.
pub const BRANCH: &str = "main";

/// The folder of the cache, by the environment: HF_HUB_CACHE, or its older name, or a folder below
/// HF_HOME, XDG_CACHE_HOME or the home folder. `None` where there is not even a home.
pub fn cache_folder(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| var(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || set("HOME");
    let tilde = |path: PathBuf| match (path.strip_prefix("~"), home()) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    };
    if let Some(path) = set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE")) {
        return Some(tilde(path));
    }
    if let Some(path) = set("HF_HOME") {
        return Some(tilde(path).join("hub"));
    }
    let caches = set("XDG_CACHE_HOME").map(tilde).or_else(|| Some(home()?.join(".cache")))?;
    Some(caches.join("huggingface").join("hub"))
}

/// One repository's folders.
#[derive(Clone, Debug)]
pub struct RepoPaths {
    cache: PathBuf,
    folder: String,
}

impl RepoPaths {
    pub fn new(cache: &Path, repo: &RepoId) -> Self {
        let folder = format!("models--{}--{}", repo.user(), repo.name());
        RepoPaths { cache: cache.to_owned(), folder }
    }

    pub fn root(&self) -> PathBuf {
        self.cache.join(&self.folder)
    }

    pub fn blobs(&self) -> PathBuf {
        self.root().join("blobs")
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.blobs().join(etag)
    }

    /// The file of an incomplete blob.
    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.blobs().join(format!("{etag}.incomplete"))
    }

    pub fn snapshots(&self) -> PathBuf {
        self.root().join("snapshots")
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.snapshots().join(commit)
    }

    pub fn pointer(&self, commit: &str, path: &str) -> PathBuf {
        self.snapshot(commit).join(path)
    }

    pub fn branch(&self) -> PathBuf {
        self.root().join("refs").join(BRANCH)
    }

    pub fn locks(&self) -> PathBuf {
        self.cache.join(".locks").join(&self.folder)
    }

    pub fn lock(&self, etag: &str) -> PathBuf {
        self.locks().join(format!("{etag}.lock"))
    }
}

/// The repository that a folder of the cache is of.
pub fn repo_of_folder(name: &str) -> Option<RepoId> {
    let (user, repo) = name.strip_prefix("models--")?.split_once("--")?;
    RepoId::parse(&format!("{user}/{repo}")).ok()
}

/// The target of a link at `snapshots/COMMIT/PATH`, relative, so that the cache can be moved as a
/// whole.
pub fn link_target(path: &str, etag: &str) -> PathBuf {
    let depth = path.split('/').count();
    // Out of PATH's folders, COMMIT and snapshots.
    let mut target: PathBuf = std::iter::repeat_n("..", depth + 1).collect();
    target.push("blobs");
    target.push(etag);
    target
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(vars: &[(&str, &str)]) -> Option<PathBuf> {
        let value = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into());
        cache_folder(value)
    }

    #[test]
    fn the_environment_says_where_the_cache_is() {
        let cases: &[(&[(&str, &str)], &str)] = &[
            (&[("HOME", "/h")], "/h/.cache/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/f")], "/f/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "~/f")], "/h/f/hub"),
            (&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[("HOME", "/h"), ("HF_HUB_CACHE", ""), ("HF_HOME", "")], "/h/.cache/huggingface/hub"),
            (&[("HF_HOME", "/f"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/old"),
        ];
        for (vars, expected) in cases {
            assert_eq!(folder(vars).as_deref(), Some(Path::new(expected)), "{vars:?}");
        }
        assert_eq!(folder(&[]), None);
    }

    #[test]
    fn folders_and_repositories_name_each_other() {
        let repo = RepoId::parse("Some-User/A.Repo-GGUF").unwrap();
        let paths = RepoPaths::new(Path::new("/c"), &repo);
        assert_eq!(paths.root(), Path::new("/c/models--Some-User--A.Repo-GGUF"));
        assert_eq!(repo_of_folder("models--Some-User--A.Repo-GGUF"), Some(repo));
        for other in ["datasets--a--b", "models--a", "models--a--", "models--a--..", ".locks"] {
            assert_eq!(repo_of_folder(other), None, "{other}");
        }
    }

    #[test]
    fn links_lead_from_a_snapshot_to_a_blob() {
        let root = Path::new("/c/models--a--b/snapshots/COMMIT");
        for path in ["x.gguf", "sub/x.gguf", "a/b/c.gguf"] {
            let mut at = root.join(path);
            at.pop();
            for part in link_target(path, "ETAG").components() {
                match part.as_os_str().to_str().unwrap() {
                    ".." => assert!(at.pop()),
                    name => at.push(name),
                }
            }
            assert_eq!(at, Path::new("/c/models--a--b/blobs/ETAG"), "{path}");
        }
    }
}
