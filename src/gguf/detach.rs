//! A model without its map. Whoever truncates a mapped file ends the process at its next touch of a
//! lost page; a program that streams experts for as long as it runs can do without that risk, as
//! what it keeps in memory it can as well have read. The map of each file is replaced by anonymous
//! memory of the same length, of which only what is kept ever gets pages, so that every offset,
//! tensor and key stays where it was.

use super::file::{Gguf, Shard};
use crate::{Error, Result, interrupt};
use memmap2::{Advice, Mmap, MmapMut, MmapOptions};
use rustix::fs::{Advice as FileAdvice, fadvise};
use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Bytes of a read: progress and Ctrl-C are as often as that.
const CHUNK_BYTES: usize = 8 << 20;

/// Kept tensors that are no further apart are read as one.
const GAP_BYTES: usize = 4096;

const HUGE_PAGE: usize = 2 << 20;

impl Gguf {
    /// Reads the headers and those tensors (by their number in `tensors`) for which `keep` is true
    /// into memory of its own, and lets go of the files' maps. `progress` is told the bytes that
    /// are read so far, and of how many. From then on only kept tensors have `bytes`, and nothing
    /// that happens to the files can harm. The files stay open, for reads.
    pub fn detached(
        mut self,
        keep: impl Fn(usize) -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Gguf> {
        let header = |shard: &Shard| {
            let header = 0..shard.header_bytes();
            vec![header]
        };
        let mut runs: Vec<Vec<Range<usize>>> = self.shards().iter().map(header).collect();
        for (_, t) in self.tensors().iter().enumerate().filter(|(index, _)| keep(*index)) {
            let start = t.file_offset as usize;
            add_run(&mut runs[t.shard], start..start + t.n_bytes as usize);
        }
        let total = runs.iter().flatten().map(|run| run.len() as u64).sum();
        let mut done = 0;
        let mut more = |n: usize| {
            done += n as u64;
            progress(done, total);
        };
        for (shard, runs) in self.shards_mut().iter_mut().zip(runs) {
            let memory = read_runs(shard, &runs, &mut more)?;
            shard.replace_map(memory, runs.clone());
            // What the map kept in the page cache, now that the map is gone.
            runs.iter().for_each(|run| forget(shard.file(), run));
        }
        Ok(self)
    }
}

/// Tensors come in the order of the file.
fn add_run(runs: &mut Vec<Range<usize>>, run: Range<usize>) {
    match runs.last_mut() {
        Some(last) if run.start - last.end <= GAP_BYTES => last.end = run.end,
        _ => runs.push(run),
    }
}

/// Memory of the file's length that has these bytes of the file and zeros elsewhere. `more` is told
/// the bytes of each read.
fn read_runs(shard: &Shard, runs: &[Range<usize>], more: &mut dyn FnMut(usize)) -> Result<Mmap> {
    let fail = |e| Error::io(shard.path(), e);
    let len = shard.map().len();
    let mut memory = MmapOptions::new().len(len).no_reserve_swap().map_anon().map_err(fail)?;
    advise(&memory, runs);
    for run in runs {
        for start in run.clone().step_by(CHUNK_BYTES) {
            interrupt::check()?;
            let chunk = start..run.end.min(start + CHUNK_BYTES);
            let out = &mut memory[chunk.clone()];
            shard.file().read_exact_at(out, start as u64).map_err(fail)?;
            forget(shard.file(), &chunk);
            more(chunk.len());
        }
    }
    memory.make_read_only().map_err(fail)
}

/// Huge pages inside the runs, where they cost no byte more, and nowhere else. Advice that the
/// kernel does not take changes speed and nothing else.
fn advise(memory: &MmapMut, runs: &[Range<usize>]) {
    let _ = memory.advise_range(Advice::NoHugePage, 0, memory.len());
    let base = memory.as_ptr().addr();
    for run in runs {
        let start = (base + run.start).next_multiple_of(HUGE_PAGE) - base;
        let end = ((base + run.end) / HUGE_PAGE * HUGE_PAGE).saturating_sub(base);
        if start < end {
            let _ = memory.advise_range(Advice::HugePage, start, end - start);
        }
    }
}

/// Drops the pages of what was read from the page cache: the file's bytes are in memory once.
fn forget(file: &File, range: &Range<usize>) {
    // Only whole pages are dropped. Those that a map still holds stay until it is gone.
    let (start, end) = (range.start / 4096 * 4096, range.end.next_multiple_of(4096));
    let len = NonZeroU64::new((end - start) as u64);
    let _ = fadvise(file, start as u64, len, FileAdvice::DontNeed);
}
