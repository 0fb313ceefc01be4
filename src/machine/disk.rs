//! The speed of random direct reads of a file, or of a folder's disk: through the link that streams
//! experts, with its own size of reads and depth.

use super::Rounds;
use super::disk_probe::{Probe, probe};
use crate::experts::disk::link::DEPTH;
use crate::experts::disk::{Files, IoKind};
use crate::experts::{DIRECT_ALIGN, READ_BYTES};
use crate::units::{at_least, at_most};
use crate::{Error, Result};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// The size of a folder's file: more than the write cache of a small disk holds for long.
const FILE_BYTES: u64 = 256 << 20;
/// The time for writing: on a slow disk the file is as large as was written within it.
const WRITE_TIME: Duration = Duration::from_millis(1500);
/// A folder with less room than this is left alone.
const LEAST_ROOM: u64 = 4 * FILE_BYTES;
const ROUNDS: usize = 3;
const ROUND_TIME: Duration = Duration::from_millis(250);
const LATENCY_TIME: Duration = Duration::from_millis(100);

/// Whether experts can be read through io_uring here, or why not.
pub fn uring() -> io::Result<()> {
    crate::experts::disk::link::uring_works()
}

/// A disk's rates and the way of measuring them.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Whether reads went past the page cache; if not, the rate is that of memory.
    pub is_direct: bool,
    pub io: IoKind,
    pub read_bytes: usize,
    pub depth: usize,
    pub gb_per_second: Rounds,
    /// The latency of single reads of 4096 bytes.
    pub latency_us: f64,
}

impl Disk {
    /// Measures a file, or a temporary file in a folder.
    pub fn measure(path: &Path) -> Result<Disk> {
        let failed = |e| Error::io(path, e);
        if path.is_dir() {
            let file = tempfile::tempfile_in(path).map_err(failed)?;
            check_room(&file, path)?;
            fill(&file).map_err(failed)?;
            return Disk::of(path, &file);
        }
        Disk::of(path, &File::open(path).map_err(failed)?)
    }

    fn of(path: &Path, file: &File) -> Result<Disk> {
        let length = file.metadata().map_err(|e| Error::io(path, e))?.len();
        // A small file is read in smaller parts.
        let read_bytes = (length as usize).min(READ_BYTES) / DIRECT_ALIGN * DIRECT_ALIGN;
        if read_bytes == 0 {
            let why = format!("{}: {length} bytes are too few to measure with", path.display());
            return Err(Error::invalid(why));
        }
        let io = if uring().is_ok() { IoKind::Uring } else { IoKind::Pread };
        let files = || Files::of([(path, file)]);
        let is_direct = files()?.is_direct(0);
        let mut rates = Vec::new();
        for seed in 0..ROUNDS as u64 {
            let ask = Probe { kind: io, read_bytes, depth: DEPTH, time: ROUND_TIME, seed };
            rates.push(probe(files()?, &ask)?.gb_per_second());
        }
        let (kind, read, time) = (IoKind::Pread, DIRECT_ALIGN, LATENCY_TIME);
        let ask = Probe { kind, read_bytes: read, depth: 1, time, seed: ROUNDS as u64 };
        let one_by_one = probe(files()?, &ask)?;
        let n_reads = (one_by_one.bytes as f64 / read as f64).max(1.0);
        let latency_us = 1e6 * one_by_one.seconds / n_reads;
        let gb_per_second = Rounds::sorted(rates);
        Ok(Disk { is_direct, io, read_bytes, depth: DEPTH, gb_per_second, latency_us })
    }
}

fn check_room(file: &File, path: &Path) -> Result<()> {
    let system = rustix::fs::fstatvfs(file).map_err(|e| Error::io(path, e.into()))?;
    let room = system.f_bavail.saturating_mul(system.f_frsize);
    if room < LEAST_ROOM {
        let (room, least) = (at_most(room), at_least(LEAST_ROOM));
        let why = format!("{}: {room} of room, but a test file needs {least}", path.display());
        return Err(Error::invalid(why));
    }
    Ok(())
}

/// Bytes that no disk can make smaller.
fn fill(mut file: &File) -> io::Result<()> {
    let (start, mut state) = (Instant::now(), 1u64);
    let mut part = vec![0; READ_BYTES];
    for _ in 0..FILE_BYTES / READ_BYTES as u64 {
        for word in part.chunks_exact_mut(8) {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&part)?;
        if start.elapsed() > WRITE_TIME {
            break;
        }
    }
    // What is not on the disk yet cannot be read from it.
    file.sync_data()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_measured_by_reads_that_fit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 3 * DIRECT_ALIGN + 5]).unwrap();
        let disk = Disk::measure(&path).unwrap();
        assert_eq!(disk.read_bytes, 3 * DIRECT_ALIGN);
        assert!(disk.gb_per_second.median() > 0.0 && disk.latency_us > 0.0, "{disk:?}");
        std::fs::write(&path, b"small").unwrap();
        let why = Disk::measure(&path).unwrap_err().to_string();
        assert!(why.contains("5 bytes"), "{why}");
        assert!(Disk::measure(&folder.path().join("none")).is_err());
    }
}
