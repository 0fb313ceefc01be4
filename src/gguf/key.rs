//! Tells one model from another without reading all of it.

use super::Gguf;
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::os::unix::fs::FileExt;

/// Tensors that are looked into, and how far.
const N_SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 64;

/// Bytes that are read of each tensor at its beginning, its middle and its end.
const PART_BYTES: usize = 256;

impl Gguf {
    /// SHA-256 over the files' headers, their lengths, and the first bytes of some tensors: of two
    /// models of one shape the weights differ. The file must not be detached yet.
    pub fn key(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for shard in self.shards() {
            hash.update(&shard.map()[..shard.header_bytes()]);
            hash.update(shard.n_bytes().to_le_bytes());
        }
        let tensors = self.tensors();
        for tensor in tensors.iter().step_by(tensors.len().div_ceil(N_SAMPLES).max(1)) {
            let bytes = self.bytes(tensor);
            hash.update(&bytes[..bytes.len().min(SAMPLE_BYTES)]);
        }
        hash.finalize().into()
    }
    /// SHA-256 over all that bits of texts depend on, as far as a short time tells: metadata, also
    /// where it is overridden, the files' headers and lengths, and parts of every tensor. It is
    /// read from the files, detached or not.
    pub fn identity(&self) -> Result<[u8; 32]> {
        let mut hash = Sha256::new();
        for shard in self.shards() {
            hash.update(&shard.map()[..shard.header_bytes()]);
            hash.update(shard.n_bytes().to_le_bytes());
        }
        for given in self.overrides() {
            hash.update(format!("{}={:?};", given.key(), given.value()));
        }
        let mut part = [0; PART_BYTES];
        for tensor in self.tensors() {
            let shard = &self.shards()[tensor.shard];
            let n_bytes = tensor.n_bytes as usize;
            let part = &mut part[..n_bytes.min(PART_BYTES)];
            let last = n_bytes - part.len();
            for start in [0, last / 2, last] {
                let at = tensor.file_offset + start as u64;
                let read = shard.file().read_exact_at(part, at);
                read.map_err(|e| Error::io(shard.path(), e))?;
                hash.update(&*part);
            }
        }
        Ok(hash.finalize().into())
    }
}
