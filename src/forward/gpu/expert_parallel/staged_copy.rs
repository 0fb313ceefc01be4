//! Copies from one device to another through pinned memory of the host, because GeForce cards do
//! not read each other's memory. Streams wait for each other; the host does not wait.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Event, Pinned, PinnedKind, Stream};

/// The alignment of pieces, for fast copies.
const ALIGN: usize = 64;

/// One half of the memory. One is downloaded while the other is uploaded.
struct Half {
    /// Recorded on the source device: the bytes are in host memory.
    written: Event,
    /// Recorded on the target device: the bytes have been read.
    read: Event,
}

pub struct StagedCopy {
    memory: Pinned,
    halves: [Half; 2],
    turn: usize,
}

impl StagedCopy {
    /// Allocates two halves of `bytes`; larger copies are split.
    pub fn new(from: &Device, to: &Device, bytes: usize) -> Result<StagedCopy> {
        let half_bytes = bytes.max(1).next_multiple_of(ALIGN);
        let what = "the GPU-to-GPU staging buffer";
        let memory = Pinned::of(from, 2 * half_bytes, PinnedKind::Cached, what)?;
        let half = || Ok(Half { written: Event::new(from)?, read: Event::new(to)? });
        Ok(StagedCopy { memory, halves: [half()?, half()?], turn: 0 })
    }

    /// Queues copies of pieces, each (from, to) of one size, behind what both streams have queued.
    pub fn copy(
        &mut self,
        from: &Stream,
        to: &Stream,
        pieces: &[(DeviceSlice, DeviceSlice)],
    ) -> Result<()> {
        let half_bytes = self.memory.len() / 2;
        let (mut batch, mut used) = (Vec::with_capacity(pieces.len()), 0);
        for (source, target) in pieces {
            assert_eq!(source.len(), target.len());
            let mut done = 0;
            while done < source.len() {
                if used == half_bytes {
                    self.flush(from, to, &batch)?;
                    batch.clear();
                    used = 0;
                }
                let end = source.len().min(done + half_bytes - used);
                batch.push((source.slice(done..end), target.slice(done..end), used));
                used = (used + end - done).next_multiple_of(ALIGN);
                done = end;
            }
        }
        self.flush(from, to, &batch)
    }

    /// Queues the copies of pieces that fit a half, each with its offset there.
    fn flush(
        &mut self,
        from: &Stream,
        to: &Stream,
        batch: &[(DeviceSlice, DeviceSlice, usize)],
    ) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let half_bytes = self.memory.len() / 2;
        let base = self.turn * half_bytes;
        let Half { written, read } = &self.halves[self.turn];
        self.turn = 1 - self.turn;
        from.wait(read)?;
        for (source, _, at) in batch {
            assert!(at + source.len() <= half_bytes);
            // SAFETY: the bytes are in the half, by the assertion. The target has read the last
            // ones, by the event, and dropping the memory waits for both devices.
            unsafe { from.download(self.memory.as_ptr().add(base + at), *source)? };
        }
        from.record(written)?;
        to.wait(written)?;
        for (_, target, at) in batch {
            // SAFETY: as above; the bytes have arrived, by the event, and nothing is written here
            // before the next one.
            unsafe { to.upload_from(*target, self.memory.as_ptr().add(base + at))? };
        }
        to.record(read)
    }
}

impl Drop for StagedCopy {
    fn drop(&mut self) {
        // Freeing the memory waits for the source device only. A lost device copies nothing more.
        for half in &self.halves {
            let _ = half.read.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::emulated::Config;
    use crate::backend::gpu::{DeviceBuffer, Emulated};

    /// Copies that are larger than the memory arrive whole and in order, whichever stream is ahead.
    #[test]
    fn what_arrives_is_what_was_sent() {
        const N: usize = 1000;
        for seed in 0..16 {
            let config = Config { devices: 2, seed, ..Config::default() };
            let gpus = Emulated::devices(&config);
            let streams = [0, 1].map(|i: usize| Stream::new(&gpus[i]).unwrap());
            let buffers = [0, 1].map(|i: usize| DeviceBuffer::new(&gpus[i], N).unwrap());
            let ([from, to], [source, target]) = (&streams, &buffers);
            let mut staged = StagedCopy::new(&gpus[0], &gpus[1], 100).unwrap();
            for round in 1..4u8 {
                let sent: Vec<u8> = (0..N).map(|i| (i as u8).wrapping_mul(round)).collect();
                from.upload_now(source.all(), &sent).unwrap();
                let piece = |at: usize, end: usize, to: usize| {
                    (source.slice(at..end), target.slice(to..to + end - at))
                };
                staged.copy(from, to, &[piece(0, 300, 700), piece(300, 301, 0)]).unwrap();
                staged.copy(from, to, &[piece(301, N, 1), piece(5, 5, 5)]).unwrap();
                let mut got = vec![0; N];
                to.download_now(&mut got, target.all()).unwrap();
                let expected = [&sent[300..301], &sent[301..], &sent[..300]].concat();
                assert!(got == expected, "seed {seed}, round {round}");
            }
        }
    }
}
