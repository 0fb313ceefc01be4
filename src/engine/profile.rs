//! The file beside the model in which policies keep what they have learned. It is a cache: where it
//! cannot be read or written the run goes on without, and says so.

use crate::policy::{ModelKey, Profile};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Where profiles are kept (`--profile`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProfileChoice {
    #[default]
    Nowhere,
    /// `model.gguf.moeba` for `model.gguf`.
    BesideModel,
    At(PathBuf),
}

impl ProfileChoice {
    pub(super) fn file(&self, model: &Path) -> Option<PathBuf> {
        match self {
            ProfileChoice::Nowhere => None,
            ProfileChoice::BesideModel => Some(beside(model)),
            ProfileChoice::At(path) => Some(path.clone()),
        }
    }
}

impl std::str::FromStr for ProfileChoice {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "none" => ProfileChoice::Nowhere,
            "auto" => ProfileChoice::BesideModel,
            path => ProfileChoice::At(path.into()),
        })
    }
}

fn beside(model: &Path) -> PathBuf {
    let mut name = OsString::from(model);
    name.push(".moeba");
    name.into()
}

/// More than any policy keeps: a file that is larger is no profile.
const BYTES_MAX: u64 = 1 << 30;

pub struct ProfileFile {
    path: PathBuf,
    model: ModelKey,
}

impl ProfileFile {
    pub fn new(path: &Path, model: ModelKey) -> ProfileFile {
        ProfileFile { path: path.to_owned(), model }
    }

    /// What is in the file; empty if there is none or it cannot be used.
    pub fn load(&self) -> Profile {
        let refuse = |why: &str| {
            log::warn!("{} is not used: {why}; policies start cold", self.path.display());
            Profile::default()
        };
        match self.read() {
            Ok(bytes) => Profile::decode(&bytes, &self.model).unwrap_or_else(|why| refuse(&why)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Profile::default(),
            Err(error) => refuse(&error.to_string()),
        }
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let meta = std::fs::metadata(&self.path)?;
        if !meta.is_file() || meta.len() > BYTES_MAX {
            return Err(io::Error::other("it is no profile of moeba"));
        }
        std::fs::read(&self.path)
    }

    /// Replaces the file at once or not at all. Sections that nobody has written this time stay:
    /// they are another policy's.
    pub fn save(&self, learned: &Profile) {
        if learned.is_empty() {
            return;
        }
        let mut profile = self
            .read()
            .ok()
            .and_then(|bytes| Profile::decode(&bytes, &self.model).ok())
            .unwrap_or_default();
        profile.merge(learned);
        if let Err(error) = self.write(&profile.encode(&self.model)) {
            log::warn!("what was learned is not kept: {}: {error}", self.path.display());
        }
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
        io::Write::write_all(&mut file, bytes)?;
        file.persist(&self.path)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ModelKey = [3; 32];

    fn learned(name: &str) -> Profile {
        let mut profile = Profile::default();
        profile.set(name, vec![1, 2, 3]);
        profile
    }

    #[test]
    fn what_was_learned_is_there_the_next_time_and_damage_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = ProfileChoice::BesideModel.file(&folder.path().join("model.gguf")).unwrap();
        assert_eq!(path.file_name().unwrap(), "model.gguf.moeba");
        let file = ProfileFile::new(&path, KEY);
        assert!(file.load().is_empty());
        file.save(&Profile::default());
        assert!(!path.exists());
        file.save(&learned("a"));
        file.save(&learned("b"));
        let both = file.load();
        assert!(both.get("a").is_some() && both.get("b").is_some());
        assert!(ProfileFile::new(&path, [4; 32]).load().is_empty());

        let whole = std::fs::read(&path).unwrap();
        for damaged in [&whole[..whole.len() / 2], b"".as_slice(), b"something else"] {
            std::fs::write(&path, damaged).unwrap();
            assert!(file.load().is_empty());
        }
        // It is made anew.
        file.save(&learned("c"));
        assert!(file.load().get("c").is_some());
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(file.load().is_empty());
        file.save(&learned("d"));
    }
}
