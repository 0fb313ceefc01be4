//! The speed of a GPU: its link, its memory, and the two products that models spend their time in.

use super::Rounds;
use super::expert_transfers::{ExpertTransfers, TYPE};
use crate::Result;
use crate::backend::gpu::acts::{DeviceActs, record_bytes};
use crate::backend::gpu::mat::DeviceMat;
use crate::backend::gpu::matmul::Products;
use crate::backend::gpu::{
    Device, DeviceBuffer, DeviceInfo, Event, MemoryInfo, Pinned, PinnedKind, Stream, Version,
};
use crate::simd::act_kind;

/// A device and its rates: 10⁹ bytes a second, or 10¹² operations.
#[derive(Clone, Debug)]
pub struct DeviceRates {
    pub info: DeviceInfo,
    pub memory: MemoryInfo,
    /// From pinned memory, from pinned memory that is write-combined, and to pinned memory.
    pub up: Rounds,
    pub up_write_combined: Rounds,
    pub down: Rounds,
    /// From device memory to device memory: what is read and what is written.
    pub copy: Rounds,
    /// Bytes of the matrix, which is all that counts.
    pub matvec: Rounds,
    /// A product and a sum are two operations.
    pub matmul_tops: Rounds,
    pub experts: ExpertTransfers,
}

/// The sizes of the measurements.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    link_bytes: usize,
    copy_bytes: usize,
    /// Rows and columns.
    matvec: [usize; 2],
    /// Rows, columns and tokens.
    matmul: [usize; 3],
    /// Bytes of an expert and of a chunk of it.
    expert: [usize; 2],
    /// Operations between two looks at the clock.
    repetitions: usize,
}

impl Sizes {
    /// For a GPU: more than its caches hold, and little enough for a report of a second.
    pub const GPU: Sizes = Sizes {
        link_bytes: 64 << 20,
        copy_bytes: 256 << 20,
        matvec: [1 << 17, 4096],
        matmul: [4096, 4096, 512],
        expert: [16 << 20, 1 << 20],
        repetitions: 4,
    };
    /// For a device whose rates mean nothing.
    pub const EMULATED: Sizes = Sizes {
        link_bytes: 64 << 10,
        copy_bytes: 64 << 10,
        matvec: [64, 256],
        matmul: [64, 256, 32],
        expert: [64 << 10, 16 << 10],
        repetitions: 1,
    };
}

impl DeviceRates {
    /// Takes about half a GiB of the device's memory, which is given back. The driver compiles the
    /// kernels at their first use on a machine, which takes longer than all the rest.
    pub fn measure(device: &Device, sizes: Sizes) -> Result<DeviceRates> {
        let (info, memory) = (device.info().clone(), device.memory()?);
        let clock = Clock::new(device, sizes.repetitions)?;
        let (cached, combined) = (PinnedKind::Cached, PinnedKind::WriteCombined);
        Ok(DeviceRates {
            up: clock.link(sizes.link_bytes, cached, true)?,
            up_write_combined: clock.link(sizes.link_bytes, combined, true)?,
            down: clock.link(sizes.link_bytes, cached, false)?,
            copy: clock.copy(sizes.copy_bytes)?,
            matvec: clock.matvec(sizes.matvec)?,
            matmul_tops: clock.matmul(sizes.matmul)?,
            experts: ExpertTransfers::measure(device, sizes.expert, sizes.repetitions)?,
            info,
            memory,
        })
    }

    /// A rate as a part of what the device's memory can do.
    pub fn of_memory(&self, gb_per_second: f64) -> Option<f64> {
        let peak = self.info.memory_bytes_per_second;
        (peak > 0).then(|| gb_per_second * 1e9 / peak as f64)
    }

    /// 10¹² int8 operations a second by the device's number of multiprocessors and its clock, where
    /// both and the architecture are known.
    pub fn int8_peak_tops(&self) -> Option<f64> {
        let DeviceInfo { compute, multiprocessors, clock_hz, .. } = self.info;
        let a_clock = int8_ops_a_clock(compute).filter(|_| clock_hz > 0)?;
        Some(a_clock as f64 * f64::from(multiprocessors) * clock_hz as f64 / 1e12)
    }
}

/// Dense int8 operations of one multiprocessor's tensor cores a clock, by NVIDIA's published peaks
/// of T4, A100, RTX 3090, RTX 4090, H100, B200 and RTX 5090.
fn int8_ops_a_clock(compute: Version) -> Option<u64> {
    match (compute.major, compute.minor) {
        (7, 5) | (8, 6) | (8, 9) | (12, 0) => Some(2048),
        (8, 0) => Some(4096),
        (9, 0) => Some(8192),
        (10, 0) => Some(16_384),
        _ => None,
    }
}

/// A stream, and events around what is timed on it.
struct Clock {
    stream: Stream,
    start: Event,
    end: Event,
    repetitions: usize,
}

impl Clock {
    fn new(device: &Device, repetitions: usize) -> Result<Clock> {
        let (start, end) = (Event::timed(device)?, Event::timed(device)?);
        Ok(Clock { stream: Stream::new(device)?, start, end, repetitions })
    }

    fn empty(&self, bytes: usize) -> Result<DeviceBuffer> {
        let buffer = DeviceBuffer::new(self.stream.gpu(), bytes)?;
        // Weights and activations of small numbers.
        self.stream.fill(buffer.all(), 1)?;
        Ok(buffer)
    }

    /// `units` a nanosecond, once the device is warm.
    fn rate(&self, units: f64, mut queue: impl FnMut(&Stream) -> Result<()>) -> Result<Rounds> {
        queue(&self.stream)?;
        self.stream.synchronize()?;
        let mut round = || -> Result<f64> {
            self.stream.record(&self.start)?;
            (0..self.repetitions).try_for_each(|_| queue(&self.stream))?;
            self.stream.record(&self.end)?;
            self.end.synchronize()?;
            // An emulated device may be done within the clock's step.
            let ns = 1e6 * f64::from(self.end.since(&self.start)?.max(1e-6));
            Ok(units * self.repetitions as f64 / ns)
        };
        let rounds = (0..Rounds::N).map(|_| round()).collect::<Result<Vec<f64>>>()?;
        Ok(Rounds::sorted(rounds))
    }

    fn link(&self, bytes: usize, kind: PinnedKind, up: bool) -> Result<Rounds> {
        let device = self.empty(bytes)?;
        let host = Pinned::new(self.stream.gpu(), bytes, kind)?;
        // SAFETY: this thread alone has it so far.
        unsafe { host.bytes_mut(0..bytes) }.fill(1);
        let rounds = self.rate(bytes as f64, |stream| {
            let start = host.as_ptr();
            // SAFETY: the bytes exist until `rate` has waited for the copies or the device is lost,
            // and nothing else uses them meanwhile.
            unsafe {
                match up {
                    true => stream.upload(device.all(), std::slice::from_raw_parts(start, bytes)),
                    false => stream.download(start, device.all()),
                }
            }
        });
        // An error may have left copies queued.
        let _ = self.stream.synchronize();
        rounds
    }

    fn copy(&self, bytes: usize) -> Result<Rounds> {
        let (from, to) = (self.empty(bytes)?, self.empty(bytes)?);
        self.rate(2.0 * bytes as f64, |stream| stream.copy(to.all(), from.all()))
    }

    fn matvec(&self, [rows, cols]: [usize; 2]) -> Result<Rounds> {
        let bytes = rows * TYPE.row_bytes(cols as u64).expect("whole blocks") as usize;
        self.product([rows, cols, 1], bytes as f64)
    }

    fn matmul(&self, [rows, cols, tokens]: [usize; 3]) -> Result<Rounds> {
        self.product([rows, cols, tokens], 2.0 * (rows * cols * tokens) as f64 / 1e3)
    }

    fn product(&self, [rows, cols, tokens]: [usize; 3], units: f64) -> Result<Rounds> {
        let products = Products::load(self.stream.gpu(), &[TYPE])?;
        let kind = act_kind(TYPE);
        let row_bytes = TYPE.row_bytes(cols as u64).expect("whole blocks") as usize;
        let (weights, records) =
            (self.empty(rows * row_bytes)?, self.empty(tokens * record_bytes(kind, cols))?);
        let out = self.empty(4 * rows * tokens)?;
        let mat = DeviceMat::dense(TYPE, weights.all(), rows, cols);
        let x = DeviceActs::new(kind, tokens, cols, records.all());
        self.rate(units, |stream| products.product(stream, mat, x, None, out.all(), rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::Emulated;
    use crate::backend::gpu::emulated::Config;

    #[test]
    fn an_emulated_device_is_measured_to_the_end() {
        let devices = Emulated::devices(&Config::default());
        let rates = DeviceRates::measure(&devices[0], Sizes::EMULATED).unwrap();
        let all = [&rates.up, &rates.up_write_combined, &rates.down, &rates.copy, &rates.matvec];
        assert!(all.iter().all(|rounds| rounds.median() > 0.0), "{rates:?}");
        let ExpertTransfers { in_place, read, chunked, whole, pageable } = &rates.experts;
        let in_place = in_place.as_ref().expect("its memory can be registered");
        let read = read.as_ref().expect("and read");
        assert!(
            [in_place, read, chunked, whole, pageable].iter().all(|rounds| rounds.median() > 0.0),
            "{rates:?}"
        );
        assert_eq!(rates.memory.free_bytes, rates.memory.total_bytes);
        assert_eq!((rates.of_memory(1.0), rates.int8_peak_tops()), (None, None));
        assert_eq!(devices[0].memory().unwrap(), rates.memory, "given back");
    }

    #[test]
    fn peaks_are_those_that_are_published() {
        // (compute, multiprocessors, Hz, 10¹² operations)
        let known = [
            (Version::new(7, 5), 40, 1_590_000_000, 130.0),
            (Version::new(8, 0), 108, 1_410_000_000, 624.0),
            (Version::new(8, 9), 128, 2_520_000_000, 660.6),
            (Version::new(9, 0), 132, 1_830_000_000, 1979.0),
        ];
        let devices = Emulated::devices(&Config::default());
        let mut rates = DeviceRates::measure(&devices[0], Sizes::EMULATED).unwrap();
        for (compute, multiprocessors, clock_hz, tops) in known {
            rates.info = DeviceInfo { compute, multiprocessors, clock_hz, ..rates.info };
            let peak = rates.int8_peak_tops().unwrap();
            assert!((peak / tops - 1.0).abs() < 0.01, "{compute:?}: {peak} for {tops}");
        }
        rates.info.compute = Version::new(6, 1);
        assert_eq!(rates.int8_peak_tops(), None);
        rates.info.memory_bytes_per_second = 2_000_000_000_000;
        assert_eq!(rates.of_memory(500.0), Some(0.25));
    }
}
