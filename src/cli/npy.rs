//! Writes NumPy arrays (format version 1.0), row by row; the file has its name only when whole.

use super::new_file::NewFile;
use crate::{Error, Result};
use std::io::Write;
use std::path::Path;

/// Header and magic together are a multiple of this.
const ALIGNMENT: usize = 64;

pub struct Npy {
    out: NewFile,
    left: usize,
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
        let mut npy = Npy { out: NewFile::create(path)?, left: shape.iter().product() };
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
        self.out.finish()
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| Error::io(self.out.path(), e))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_is_header_and_values() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.npy");
        let mut npy = Npy::create::<f32>(&path, &[2, 1]).unwrap();
        npy.write(&[1.0f32]).unwrap();
        npy.write(&[-2.0f32]).unwrap();
        npy.finish().unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 128 + 8);
        assert_eq!(bytes[..10], *b"\x93NUMPY\x01\x00\x76\x00");
        let text = std::str::from_utf8(&bytes[10..128]).unwrap();
        let expected = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1,), }";
        assert!(text.starts_with(expected) && text.ends_with(" \n"), "{text:?}");
        assert_eq!(bytes[128..], *b"\0\0\x80\x3f\0\0\0\xc0");
    }
}
