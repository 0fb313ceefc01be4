//! The file beside the model in which policies keep what they have learned. It is a cache: where it
//! cannot be written the run goes on without, and says so.

use crate::policy::{ModelKey, Profile};
use crate::{Error, Result, error, interrupt};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// The file of the policies' profile (`--profile`).
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

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
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

/// A file that is, or will be, the profile of one model.
pub struct ProfileFile {
    path: PathBuf,
    model: ModelKey,
}

impl ProfileFile {
    /// The file that keeps the profile of `model`; none where there is to be none. What is not
    /// that model's profile is never replaced: a file that was named is refused, and where one is
    /// in the way of the default nothing is kept.
    pub fn open(
        choice: &ProfileChoice,
        model: &Path,
        key: ModelKey,
    ) -> Result<Option<ProfileFile>> {
        let Some(path) = choice.file(model) else { return Ok(None) };
        let file = ProfileFile { path, model: key };
        let Err(why) = file.read() else { return Ok(Some(file)) };
        let path = file.path.display();
        if matches!(choice, ProfileChoice::At(_)) {
            return Err(Error::invalid(format!(
                "{path}: {why}; name another file with --profile, or none"
            )));
        }
        log::warn!("{path}: {why}; it is neither used nor replaced (delete it for a new profile)");
        Ok(None)
    }

    pub(super) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// The file's content; empty if there is no file.
    pub fn load(&self) -> Profile {
        self.read().unwrap_or_else(|why| {
            log::warn!("{}: {why}; policies start without a profile", self.path.display());
            Profile::default()
        })
    }

    /// The error is a clause: why this is not the model's profile.
    fn read(&self) -> std::result::Result<Profile, String> {
        let meta = match std::fs::metadata(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Profile::default()),
            meta => meta.map_err(|e| error::sentence(&e))?,
        };
        if !meta.is_file() || meta.len() > BYTES_MAX {
            return Err("not a moeba profile".into());
        }
        let bytes = std::fs::read(&self.path).map_err(|e| error::sentence(&e))?;
        if bytes.is_empty() {
            return Ok(Profile::default());
        }
        Profile::decode(&bytes, &self.model)
    }

    /// Replaces the file at once or not at all. Sections that this run has not written stay: they
    /// are another policy's.
    pub fn save(&self, learned: &Profile) {
        if let Err(why) = self.try_save(learned) {
            log::warn!("{why}");
        }
    }

    /// [`ProfileFile::save`]; the error is a clause that names the file.
    pub(super) fn try_save(&self, learned: &Profile) -> std::result::Result<(), String> {
        if learned.is_empty() {
            return Ok(());
        }
        // Another process may have put something else there meanwhile.
        let saved = self.read().and_then(|mut profile| {
            profile.merge(learned);
            self.write(&profile.encode(&self.model)).map_err(|e| error::sentence(&e))
        });
        let path = self.path.display();
        saved.map_err(|why| format!("the policies' profile was not saved: {path}: {why}"))
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
        let _guard = interrupt::guard(file.path());
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

    fn at(path: &Path, key: ModelKey) -> Result<Option<ProfileFile>> {
        ProfileFile::open(&ProfileChoice::At(path.into()), Path::new("model.gguf"), key)
    }

    #[test]
    fn what_was_learned_is_there_the_next_time() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model.gguf");
        let beside = ProfileChoice::BesideModel;
        let path = beside.file(&model).unwrap();
        assert_eq!(path.file_name().unwrap(), "model.gguf.moeba");
        let file = ProfileFile::open(&beside, &model, KEY).unwrap().unwrap();
        assert!(file.load().is_empty());
        file.save(&Profile::default());
        assert!(!path.exists());
        file.save(&learned("a"));
        file.save(&learned("b"));
        let both = file.load();
        assert!(both.get("a").is_some() && both.get("b").is_some());
        assert!(ProfileFile::open(&ProfileChoice::Nowhere, &model, KEY).unwrap().is_none());
        // An empty file, as mktemp makes it.
        std::fs::write(&path, b"").unwrap();
        file.save(&learned("c"));
        assert!(file.load().get("c").is_some());
    }

    #[test]
    fn what_is_not_the_models_profile_stays() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model.gguf");
        let beside = ProfileChoice::BesideModel;
        let path = beside.file(&model).unwrap();
        let whole = learned("a").encode(&KEY);
        let others = learned("a").encode(&[4; 32]);
        for (bytes, why) in [
            (&whole[..whole.len() / 2], "damaged"),
            (b"something else".as_slice(), "not a moeba profile"),
            (&others, "another model"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let e = at(&path, KEY).err().unwrap().to_string();
            assert!(e.contains(why) && e.contains("model.gguf.moeba: "), "{e}");
            assert!(ProfileFile::open(&beside, &model, KEY).unwrap().is_none());
            // It came after the run began.
            ProfileFile { path: path.clone(), model: KEY }.save(&learned("c"));
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(at(&path, KEY).is_err());
    }
}
