//! A file that has its name only when it is whole.

use crate::{Error, Result, interrupt};
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

pub struct NewFile {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
    _guard: interrupt::Guard,
}

impl NewFile {
    pub fn create(path: &Path) -> Result<NewFile> {
        if path.exists() && !path.is_file() {
            let got = "something that is no file";
            return Err(Error::format(path, "file", "the name of a file", got));
        }
        let temp = temporary(path).map_err(|e| Error::io(path, e))?;
        let guard = interrupt::guard(temp.path());
        Ok(NewFile { path: path.into(), out: BufWriter::new(temp), _guard: guard })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it its name.
    pub fn finish(self) -> Result<()> {
        let path = self.path;
        let temp = self.out.into_inner().map_err(|e| Error::io(&path, e.into_error()))?;
        temp.as_file().sync_all().map_err(|e| Error::io(&path, e))?;
        temp.persist(&path).map_err(|e| Error::io(&path, e.error))?;
        Ok(())
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A hidden file beside `path`, with the permissions of an ordinary one.
fn temporary(path: &Path) -> io::Result<NamedTempFile> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moeba-").suffix(".part");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_comes_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut file = NewFile::create(&path).unwrap();
        file.write_all(b"abc").unwrap();
        assert!(!path.exists());
        file.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"abc");
    }

    #[test]
    fn a_name_that_is_no_file_is_refused() {
        for path in ["/dev/null", "."] {
            assert!(NewFile::create(Path::new(path)).is_err());
        }
    }
}
