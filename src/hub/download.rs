//! One file's content into the cache: resumed where it was left, checked, and given its name only
//! when it is whole.

use super::http::{self, FileResponse, Http};
use super::listing::RemoteFile;
use super::paths::RepoPaths;
use super::range::{self, Plan};
use super::retry::{Failure, Tries, Try};
use super::{Config, RepoId, lock, names};
use crate::{Error, Result, interrupt};
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Bytes of a read from the network or of what is there.
const CHUNK_BYTES: usize = 1 << 20;

/// A file to download: its source and its destination.
pub struct DownloadJob<'a> {
    pub config: &'a Config,
    pub http: &'a Http<'a>,
    pub repo: &'a RepoId,
    pub paths: &'a RepoPaths,
    pub file: &'a RemoteFile,
    pub url: String,
}

impl DownloadJob<'_> {
    /// Downloads the blob, unless it is there. `progress` gets the number of bytes that are there,
    /// and fails if no more are wanted.
    pub fn run(&self, progress: &mut dyn FnMut(u64) -> Result<()>) -> Try<()> {
        let file = self.file;
        let folder = self.paths.blobs();
        fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, e))?;
        let _lock = lock::acquire(&self.paths.lock(&file.etag), &file.path)?;
        let blob = self.paths.blob(&file.etag);
        // It may have come while the lock was waited for.
        if is_whole(&blob, file.size) {
            return Ok(());
        }
        let mut part = PartFile::open(self.paths.incomplete(&file.etag), file.size)?;
        progress(part.len)?;
        let sha256 = self.receive(&mut part, progress)?;
        self.check(&mut part, file.sha256().or(sha256.as_deref()))?;
        part.persist(&blob)?;
        Ok(())
    }

    /// Until all bytes are there; answers the checksum that the server told besides.
    fn receive(
        &self,
        part: &mut PartFile,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Try<Option<String>> {
        let mut tries = Tries::new(&self.config.patience);
        let mut sha256 = None;
        while self.file.size.is_none_or(|size| part.len < size) {
            let before = part.len;
            let result = self.receive_some(part, &mut sha256, progress);
            if part.len > before {
                tries.progressed();
            }
            match result {
                // Of a file of unknown length, the end of an answer is the end.
                Ok(()) if self.file.size.is_none() => break,
                Ok(()) => {}
                Err(failure) => tries.again(failure)?,
            }
        }
        Ok(sha256)
    }

    /// One request.
    fn receive_some(
        &self,
        part: &mut PartFile,
        sha256: &mut Option<String>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Try<()> {
        let answer = self.http.get(&self.url, Some(part.len), self.repo)?;
        if let Some(etag) = answer.linked_etag.as_deref().filter(|etag| names::is_sha256(etag)) {
            *sha256 = Some(etag.to_owned());
        }
        let head = range::RangeResponse {
            status: answer.status,
            content_range: answer.header("content-range"),
            content_length: answer.body.content_length(),
        };
        match range::plan(part.len, self.file.size, head) {
            Plan::Append { .. } => {}
            Plan::Restart { .. } => part.reset()?,
            Plan::Discard => {
                part.reset()?;
                let why = format!(
                    "{}: the server does not answer the request for the rest",
                    self.label().display()
                );
                return Err(Failure::passing(why));
            }
            Plan::Refuse { expected, got } => {
                let (expected, got) = (format!("{expected} bytes"), format!("{got}"));
                return Err(Error::format(self.label(), "length", expected, got).into());
            }
        }
        self.copy(answer, part, progress)
    }

    fn copy(
        &self,
        answer: FileResponse,
        part: &mut PartFile,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Try<()> {
        let mut reader = answer.body.into_reader();
        let mut buffer = vec![0; CHUNK_BYTES];
        let room = self.file.size.unwrap_or(u64::MAX);
        loop {
            interrupt::check()?;
            let n = match reader.read(&mut buffer) {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(http::broken(&self.url, &e)),
            };
            if n == 0 {
                break;
            }
            if part.len.saturating_add(n as u64) > room {
                let got = "more bytes than the hub announced";
                let expected = format!("{room} bytes");
                return Err(Error::format(self.label(), "length", expected, got).into());
            }
            part.write(&buffer[..n])?;
            progress(part.len)?;
        }
        match self.file.size {
            Some(size) if part.len < size => {
                let (label, len) = (self.label(), part.len);
                let why = format!(
                    "{}: the connection closed after {len} of {size} bytes",
                    label.display()
                );
                Err(Failure::passing(why))
            }
            _ => Ok(()),
        }
    }

    /// Compares the content with its checksum; what is wrong is removed.
    fn check(&self, part: &mut PartFile, sha256: Option<&str>) -> Result<()> {
        let Some(expected) = sha256 else {
            let label = self.label();
            log::warn!(
                "{}: the hub gives no SHA-256 for this file; only its length is checked",
                label.display()
            );
            return Ok(());
        };
        let got = part.sha256();
        if got == expected {
            return Ok(());
        }
        part.remove()?;
        let got = format!("{got} (the download was deleted: try again)");
        Err(Error::format(self.label(), "SHA-256", expected, got))
    }

    /// The file as messages name it.
    fn label(&self) -> PathBuf {
        Path::new(&self.repo.to_string()).join(&self.file.path)
    }
}

/// Whether a file is there, in its full length.
pub fn is_whole(path: &Path, size: Option<u64>) -> bool {
    let found = fs::metadata(path).ok().filter(|meta| meta.is_file());
    found.is_some_and(|meta| size.is_none_or(|size| meta.len() == size))
}

/// An unfinished file and the hash of what it has.
struct PartFile {
    path: PathBuf,
    file: File,
    len: u64,
    hash: Sha256,
}

impl PartFile {
    /// Opens or creates it, and hashes its bytes. A file longer than `size` is emptied.
    fn open(path: PathBuf, size: Option<u64>) -> Result<PartFile> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(|e| Error::io(&path, e))?;
        let mut part = PartFile { path, file, len: 0, hash: Sha256::new() };
        let len = part.file.metadata().map_err(|e| part.fault(e))?.len();
        if size.is_some_and(|size| len > size) {
            part.len = len;
            part.reset()?;
            return Ok(part);
        }
        let mut buffer = vec![0; CHUNK_BYTES];
        while part.len < len {
            interrupt::check()?;
            let most = (len - part.len).min(CHUNK_BYTES as u64) as usize;
            let n = part.file.read(&mut buffer[..most]).map_err(|e| part.fault(e))?;
            if n == 0 {
                break;
            }
            part.hash.update(&buffer[..n]);
            part.len += n as u64;
        }
        Ok(part)
    }

    /// Forgets what it has.
    fn reset(&mut self) -> Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(|e| self.fault(e))?;
        self.len = 0;
        self.hash = Sha256::new();
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| self.fault(e))?;
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn sha256(&mut self) -> String {
        let digest = std::mem::take(&mut self.hash).finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn remove(&self) -> Result<()> {
        fs::remove_file(&self.path).map_err(|e| self.fault(e))
    }

    /// Gives it its name, once it is on the disk.
    fn persist(self, blob: &Path) -> Result<()> {
        self.file.sync_all().map_err(|e| self.fault(e))?;
        fs::rename(&self.path, blob).map_err(|e| Error::io(blob, e))
    }

    fn fault(&self, e: io::Error) -> Error {
        if e.kind() != io::ErrorKind::StorageFull {
            return Error::io(&self.path, e);
        }
        Error::Invalid(format!(
            "{}: no space left on the disk after {} bytes; the next download continues from there",
            self.path.display(),
            self.len
        ))
    }
}
