//! The gain of PreScope's AsyncIO (its section 4.4) on this machine: experts go from the host's
//! memory to a GPU in chunks out of memory that is registered, or through registered buffers, as
//! the engine's link does it; as one transfer through such a buffer; and as one transfer out of
//! pageable memory, which is what a framework does that knows nothing of experts. A product out of
//! registered memory, without a copy, is what the engine does with some missed experts.

use std::ops::Range;
use std::ptr::NonNull;
use std::time::Instant;

use super::Rounds;
use crate::backend::gpu::acts::{DeviceActs, record_bytes};
use crate::backend::gpu::mat::DeviceMat;
use crate::backend::gpu::matvec::{Matvec, ProductOut};
use crate::backend::gpu::{
    Device, DeviceBuffer, DeviceSlice, Event, Pinned, PinnedKind, Registered, Stream,
};
use crate::experts::memory::Region;
use crate::gguf::TensorType;
use crate::simd::act_kind;
use crate::{Error, Result};

/// The most common type of weights.
pub const TYPE: TensorType = TensorType::Q4_K;

/// 10⁹ bytes a second of an expert, from the moment it is asked for to the moment it is there.
#[derive(Clone, Debug)]
pub struct ExpertTransfers {
    /// Chunk by chunk out of registered memory; `None` where it cannot be registered.
    pub in_place: Option<Rounds>,
    /// Read by a kernel where it is registered; `None` where kernels cannot.
    pub read: Option<Rounds>,
    /// Chunk by chunk: one is packed into a registered buffer while the one before it is copied.
    pub chunked: Rounds,
    /// Packed into a registered buffer, and then copied.
    pub whole: Rounds,
    /// Copied from where it is.
    pub pageable: Rounds,
}

/// Buffers that chunks take in turns, as many as the engine's link has.
const RING: usize = 3;

/// Experts that the host holds: more than one, so that each comes from memory and not from a cache.
const N_EXPERTS: usize = 4;

const PAGE: usize = 4096;

/// Columns of an expert's matrix.
const COLS: usize = 2048;

fn row_bytes() -> usize {
    TYPE.row_bytes(COLS as u64).expect("whole blocks") as usize
}

/// Whole rows of an expert's matrix.
fn rows(expert_bytes: usize) -> usize {
    expert_bytes / row_bytes()
}

struct Bench {
    stream: Stream,
    host: Region,
    device: DeviceBuffer,
    pinned: Pinned,
    copied: Vec<Event>,
    kernels: Matvec,
    /// A record of activations and the products, f32 [rows]
    acts: DeviceBuffer,
    products: DeviceBuffer,
    expert_bytes: usize,
    chunk_bytes: usize,
}

impl ExpertTransfers {
    /// The bytes of an expert, and those of a chunk of it.
    pub fn measure(
        device: &Device,
        [expert_bytes, chunk_bytes]: [usize; 2],
        repetitions: usize,
    ) -> Result<ExpertTransfers> {
        assert!(expert_bytes.is_multiple_of(chunk_bytes) && RING * chunk_bytes <= expert_bytes);
        let acts = record_bytes(act_kind(TYPE), COLS);
        let mut bench = Bench {
            stream: Stream::new(device)?,
            kernels: Matvec::load(device, &[TYPE])?,
            acts: DeviceBuffer::new(device, acts)?,
            products: DeviceBuffer::new(device, 4 * rows(expert_bytes))?,
            host: experts(expert_bytes)?,
            device: DeviceBuffer::new(device, expert_bytes)?,
            pinned: Pinned::new(device, expert_bytes, PinnedKind::WriteCombined)?,
            copied: (0..RING).map(|_| Event::restful(device)).collect::<Result<_>>()?,
            expert_bytes,
            chunk_bytes,
        };
        let rates = bench.measure(device, repetitions);
        // An error may have left copies queued out of these buffers.
        let waited = bench.stream.synchronize();
        rates.and_then(|rates| waited.map(|()| rates))
    }
}

/// Memory of experts, in whole pages.
fn experts(expert_bytes: usize) -> Result<Region> {
    let n = (N_EXPERTS * expert_bytes).next_multiple_of(PAGE);
    let region = Region::new(n)
        .map_err(|e| Error::Device(format!("cannot allocate {n} bytes of experts: {e}")))?;
    // SAFETY: all of the region, which nothing else uses yet.
    unsafe { region.ptr().write_bytes(1, n) };
    Ok(region)
}

impl Bench {
    /// Bytes of an expert; nothing writes to them any more.
    fn host(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.host.len());
        // SAFETY: in the region, written in `experts`, and only read since.
        unsafe { std::slice::from_raw_parts(self.host.ptr().add(range.start), range.len()) }
    }

    /// The rates of copies and of kernels out of memory that is registered meanwhile.
    fn registered(&mut self, device: &Device, repetitions: usize) -> Result<[Option<Rounds>; 2]> {
        let start = NonNull::new(self.host.ptr()).expect("a region");
        // SAFETY: the region ends after `bench`, in which the registration does not outlive this.
        let Ok(registered) = (unsafe { Registered::new(device, start, self.host.len()) }) else {
            return Ok([None, None]);
        };
        let copied = self.rate(repetitions, Bench::in_place);
        let read = registered.all().map(|memory| {
            self.stream.fill(self.acts.all(), 0)?;
            self.rate(repetitions, |bench, expert| bench.read(memory, expert))
        });
        // Nothing may be queued when the memory is let go of.
        let waited = self.stream.synchronize();
        drop(registered);
        waited?;
        Ok([Some(copied?), read.transpose()?])
    }

    fn measure(&mut self, device: &Device, repetitions: usize) -> Result<ExpertTransfers> {
        let [in_place, read] = self.registered(device, repetitions)?;
        Ok(ExpertTransfers {
            in_place,
            read,
            chunked: self.rate(repetitions, Bench::chunked)?,
            whole: self.rate(repetitions, Bench::whole)?,
            pageable: self.rate(repetitions, Bench::pageable)?,
        })
    }

    /// `transfer` queues copies or reads of the expert with this number; they are waited for one
    /// expert at a time.
    fn rate(
        &mut self,
        repetitions: usize,
        transfer: impl Fn(&mut Bench, usize) -> Result<()>,
    ) -> Result<Rounds> {
        let round = |bench: &mut Bench| -> Result<f64> {
            let start = Instant::now();
            for i in 0..repetitions {
                transfer(bench, i % N_EXPERTS)?;
                bench.stream.synchronize()?;
            }
            let ns = start.elapsed().as_nanos().max(1) as f64;
            Ok((repetitions * bench.expert_bytes) as f64 / ns)
        };
        // The first one warms up.
        round(self)?;
        let rounds = (0..Rounds::N).map(|_| round(self)).collect::<Result<Vec<f64>>>()?;
        Ok(Rounds::sorted(rounds))
    }

    fn in_place(&mut self, expert: usize) -> Result<()> {
        let n = self.chunk_bytes;
        for chunk in 0..self.expert_bytes / n {
            let from = expert * self.expert_bytes + chunk * n;
            let to = self.device.all().slice(chunk * n..(chunk + 1) * n);
            // SAFETY: nothing writes to the host's experts, and they end after this copy has been
            // waited for.
            unsafe { self.stream.upload(to, self.host(from..from + n))? };
        }
        Ok(())
    }

    /// A product of the expert, as one matrix, out of `memory`, where all of them lie.
    fn read(&mut self, memory: DeviceSlice, expert: usize) -> Result<()> {
        let (rows, start) = (rows(self.expert_bytes), expert * self.expert_bytes);
        let range = start..start + rows * row_bytes();
        let mat = DeviceMat::dense(TYPE, memory.slice(range.clone()), rows, COLS);
        let x = DeviceActs::new(act_kind(TYPE), 1, COLS, self.acts.all());
        let out = ProductOut { data: self.products.all(), stride: rows, scale: None };
        let queue = || self.kernels.launch(&self.stream, mat, x, None, out);
        // SAFETY: nothing writes to the host's experts, and they end after this has been waited
        // for.
        unsafe { self.stream.reading(&[self.host(range)], queue) }
    }

    fn chunked(&mut self, expert: usize) -> Result<()> {
        let n = self.chunk_bytes;
        for chunk in 0..self.expert_bytes / n {
            let buffer = chunk % RING;
            if chunk >= RING {
                self.copied[buffer].synchronize()?;
            }
            let from = expert * self.expert_bytes + chunk * n;
            // SAFETY: the last copy out of this buffer has been waited for, here or at the end of
            // the expert before.
            let packed = unsafe { self.pinned.bytes_mut(buffer * n..(buffer + 1) * n) };
            packed.copy_from_slice(self.host(from..from + n));
            // SAFETY: the buffer is packed again, and ends, after this copy has been waited for.
            unsafe {
                self.stream.upload(self.device.all().slice(chunk * n..(chunk + 1) * n), packed)?
            };
            self.stream.record(&self.copied[buffer])?;
        }
        Ok(())
    }

    fn whole(&mut self, expert: usize) -> Result<()> {
        let n = self.expert_bytes;
        // SAFETY: the copy of the expert before has been waited for.
        let packed = unsafe { self.pinned.bytes_mut(0..n) };
        packed.copy_from_slice(self.host(expert * n..(expert + 1) * n));
        // SAFETY: the buffer is packed again, and ends, after this copy has been waited for.
        unsafe { self.stream.upload(self.device.all(), packed) }
    }

    fn pageable(&mut self, expert: usize) -> Result<()> {
        let n = self.expert_bytes;
        // SAFETY: nothing writes to the host's experts, and they end after this copy has been
        // waited for.
        unsafe { self.stream.upload(self.device.all(), self.host(expert * n..(expert + 1) * n)) }
    }
}
