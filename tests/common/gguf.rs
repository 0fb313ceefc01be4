//! Helpers of the GGUF tests: the fixtures' folder, and files put together byte by byte so that any
//! part of them can be wrong.

use std::path::PathBuf;

pub fn fixture(name: &str) -> PathBuf {
    crate::repo().join("tests/fixtures/gguf").join(name)
}

pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;

/// A GGUF file in the making; nothing is checked.
#[derive(Clone, Default)]
pub struct Raw(pub Vec<u8>);

impl Raw {
    pub fn new(version: u32, n_tensors: u64, n_keys: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(version).u64(n_tensors).u64(n_keys)
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Raw {
        self.0.extend(bytes);
        self
    }

    pub fn u32(self, n: u32) -> Raw {
        self.bytes(&n.to_le_bytes())
    }

    pub fn u64(self, n: u64) -> Raw {
        self.bytes(&n.to_le_bytes())
    }

    pub fn string(self, text: impl AsRef<[u8]>) -> Raw {
        let text = text.as_ref();
        self.u64(text.len() as u64).bytes(text)
    }

    /// A key and its value's type; the value is to follow.
    pub fn key(self, key: impl AsRef<[u8]>, ty: u32) -> Raw {
        self.string(key).u32(ty)
    }

    /// A key with an array; the elements are to follow.
    pub fn array(self, key: &str, ty: u32, len: u64) -> Raw {
        self.key(key, ARRAY).u32(ty).u64(len)
    }

    pub fn tensor(self, name: impl AsRef<[u8]>, dims: &[u64], ty: u32, offset: u64) -> Raw {
        let raw = self.string(name).u32(dims.len() as u32);
        dims.iter().fold(raw, |raw, &d| raw.u64(d)).u32(ty).u64(offset)
    }

    /// Zeros up to the next multiple of `alignment`, then so many bytes of data.
    pub fn data(mut self, alignment: usize, n: usize) -> Raw {
        self.0.resize(self.0.len().next_multiple_of(alignment) + n, 0);
        self
    }
}
