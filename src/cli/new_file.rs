//! A file that has its name only when it is whole.

use super::out;
use crate::{Error, Result, interrupt};
use std::fs::{self, OpenOptions};
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
            let got = "a folder, device or pipe";
            return Err(Error::format(path, "file", "the name of a file", got));
        }
        // A symbolic link stays one.
        let path = path.canonicalize().unwrap_or(path.into());
        let temp = temporary(&path).map_err(|e| Error::io(&path, e))?;
        let guard = interrupt::guard(temp.path());
        Ok(NewFile { path, out: BufWriter::new(temp), _guard: guard })
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

/// The folder that a file is in.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether a name is that of a pipe, a terminal or another device, or `-`, standard output: where
/// bytes are sent and no file is replaced. Whatever the shell has put behind /dev/stdout is one.
pub fn is_stream(path: &Path) -> bool {
    const OPENED: [&str; 4] = ["/dev/stdout", "/dev/stderr", "/dev/fd", "/proc"];
    let is_open = OPENED.iter().any(|name| path.starts_with(name));
    let is = |special: bool| {
        fs::metadata(path).is_ok_and(|meta| !meta.is_dir() && (special || !meta.is_file()))
    };
    path.as_os_str() == "-" || is(is_open)
}

/// Writes text as a whole: a new file, or into a stream.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    if path.as_os_str() == "-" {
        return out::write(text.as_bytes());
    }
    if is_stream(path) {
        let open = OpenOptions::new().append(true).open(path);
        return open
            .and_then(|mut stream| stream.write_all(text.as_bytes()))
            .map_err(|e| Error::io(path, e));
    }
    let mut file = NewFile::create(path)?;
    file.write_all(text.as_bytes()).map_err(|e| Error::io(path, e))?;
    file.finish()
}

/// A hidden file beside `path`, with the permissions of an ordinary one.
fn temporary(path: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moeba-").suffix(".part");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder(path))
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
    fn a_link_stays_a_link_and_a_device_a_device() {
        let dir = tempfile::tempdir().unwrap();
        let (link, path) = (dir.path().join("link"), dir.path().join("x"));
        fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write_text(&link, "new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"new");
        write_text(Path::new("/dev/null"), "lost").unwrap();
        assert!(is_stream(Path::new("/dev/null")) && is_stream(Path::new("-")));
        assert!(!is_stream(&path) && !is_stream(dir.path()) && !is_stream(Path::new("./-")));
    }

    #[test]
    fn a_name_that_is_no_file_is_refused() {
        for path in ["/dev/null", "."] {
            assert!(NewFile::create(Path::new(path)).is_err());
        }
    }
}
