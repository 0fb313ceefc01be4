//! Writes NumPy arrays (format version 1.0), row by row; the file has its name only when whole.

use crate::{Error, Result, interrupt};
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Header and magic together are a multiple of this.
const ALIGNMENT: usize = 64;

pub struct Npy {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
    left: usize,
    _guard: interrupt::Guard,
}

/// An element that NumPy knows.
pub trait Element: Copy {
    const DESCR: &'static str;
    fn bytes(self) -> [u8; 4];
}

impl Element for f32 {
    const DESCR: &'static str = "<f4";
    fn bytes(self) -> [u8; 4] {
        self.to_le_bytes()
    }
}

impl Element for i32 {
    const DESCR: &'static str = "<i4";
    fn bytes(self) -> [u8; 4] {
        self.to_le_bytes()
    }
}

impl Npy {
    /// An array of this shape, in C order.
    pub fn create<T: Element>(path: &Path, shape: &[usize]) -> Result<Npy> {
        if path.exists() && !path.is_file() {
            let got = "something that is no file";
            return Err(Error::format(path, "file", "the name of a file", got));
        }
        let temp = temporary(path).map_err(|e| Error::io(path, e))?;
        let guard = interrupt::guard(temp.path());
        let left = shape.iter().product();
        let mut npy = Npy { path: path.into(), out: BufWriter::new(temp), left, _guard: guard };
        npy.put(&header(T::DESCR, shape))?;
        Ok(npy)
    }

    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<()> {
        assert!(values.len() <= self.left, "more values than the shape has room for");
        self.left -= values.len();
        values.iter().try_for_each(|value| self.put(&value.bytes()))
    }

    pub fn finish(self) -> Result<()> {
        assert!(self.left == 0, "{} values are missing", self.left);
        let path = self.path;
        let temp = self.out.into_inner().map_err(|e| Error::io(&path, e.into_error()))?;
        temp.as_file().sync_all().map_err(|e| Error::io(&path, e))?;
        temp.persist(&path).map_err(|e| Error::io(&path, e.error))?;
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| Error::io(&self.path, e))
    }
}

fn header(descr: &str, shape: &[usize]) -> Vec<u8> {
    let dims: String = shape.iter().map(|dim| format!("{dim}, ")).collect();
    let shape = format!("({})", dims.trim_end());
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    // Magic (6), version (2) and length (2), then the text with its line end.
    let total = (10 + text.len() + 1).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', total - 10 - text.len() - 1));
    text.push('\n');
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend((text.len() as u16).to_le_bytes());
    out.extend(text.as_bytes());
    out
}

/// A hidden file beside `path`, with the permissions of an ordinary one.
fn temporary(path: &Path) -> std::io::Result<NamedTempFile> {
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
    fn a_file_is_header_and_values() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.npy");
        let mut npy = Npy::create::<f32>(&path, &[2, 1]).unwrap();
        npy.write(&[1.0f32]).unwrap();
        npy.write(&[-2.0f32]).unwrap();
        assert!(!path.exists());
        npy.finish().unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 128 + 8);
        assert_eq!(bytes[..10], *b"\x93NUMPY\x01\x00\x76\x00");
        let text = std::str::from_utf8(&bytes[10..128]).unwrap();
        let expected = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1,), }";
        assert!(text.starts_with(expected) && text.ends_with(" \n"), "{text:?}");
        assert_eq!(bytes[128..], *b"\0\0\x80\x3f\0\0\0\xc0");
    }

    #[test]
    fn a_name_that_is_no_file_is_refused() {
        for path in ["/dev/null", "."] {
            assert!(Npy::create::<f32>(Path::new(path), &[0]).is_err());
        }
    }
}
