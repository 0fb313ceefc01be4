//! Pinned host memory through which small things go up and come down in the course of a pass.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Pinned, PinnedKind, Stream};
use crate::simd::FloatBuffer;

const LINE: usize = 64;

/// Given out piece by piece; all of it is free again when the stream has been waited for.
pub struct Staging {
    up: Pinned,
    down: Pinned,
    used: usize,
}

impl Staging {
    /// `bytes` of room for what goes up between two waits (more is possible: then it waits in
    /// between), and `down_bytes` for what comes down at once.
    pub fn new(gpu: &Device, bytes: usize, down_bytes: usize) -> Result<Staging> {
        let pinned = |bytes| Pinned::of(gpu, bytes, PinnedKind::Cached, "a micro-batch (-ub)");
        let (up, down) = (pinned(bytes.next_multiple_of(LINE))?, pinned(down_bytes.max(LINE))?);
        Ok(Staging { up, down, used: 0 })
    }

    /// Queues an upload of numbers, f32s, u32s or u64s, whose bytes are written now.
    ///
    /// # Panics
    /// If there are more of them than the staging buffer has.
    pub fn upload<T: Copy, const N: usize>(
        &mut self,
        stream: &Stream,
        to: DeviceSlice,
        values: &[T],
        bytes: impl Fn(T) -> [u8; N],
    ) -> Result<()> {
        let n_bytes = N * values.len();
        assert!(n_bytes <= self.up.len(), "{n_bytes} bytes to stage");
        if self.used + n_bytes > self.up.len() {
            self.wait(stream)?;
        }
        let place = self.used..self.used + n_bytes;
        self.used = place.end.next_multiple_of(LINE);
        // SAFETY: nobody has these bytes since the last wait; they stay as they are until the
        // next one.
        unsafe {
            let staged = self.up.bytes_mut(place);
            for (staged, value) in staged.as_chunks_mut::<N>().0.iter_mut().zip(values) {
                *staged = bytes(*value);
            }
            stream.upload(to, staged)
        }
    }

    /// Waits for the stream: what was staged has gone.
    pub fn wait(&mut self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        self.used = 0;
        Ok(())
    }

    /// Brings several pieces down and waits for them; `take` gets each, in order.
    pub fn download(
        &mut self,
        stream: &Stream,
        parts: &[DeviceSlice],
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        let sizes: Vec<usize> = parts.iter().map(|part| part.len()).collect();
        for (part, at) in parts.iter().zip(starts(&sizes)) {
            assert!(at + part.len() <= self.down.len(), "{} bytes to bring down", part.len());
            // SAFETY: in the buffer, by the assertion; nobody uses it before the wait below.
            unsafe { stream.download(self.down.as_ptr().add(at), *part)? };
        }
        self.wait(stream)?;
        for (i, (at, size)) in starts(&sizes).zip(&sizes).enumerate() {
            // SAFETY: the copies have been waited for.
            take(i, unsafe { self.down.bytes(at..at + size) });
        }
        Ok(())
    }
}

/// Where parts of these sizes begin that lie one behind the other, each on a line of its own.
pub fn starts(sizes: &[usize]) -> impl Iterator<Item = usize> {
    sizes.iter().scan(0, |end, size| {
        let start = *end;
        *end = (start + size).next_multiple_of(LINE);
        Some(start)
    })
}

/// f32s that came down.
pub fn floats(bytes: &[u8], out: &mut impl FloatBuffer) {
    let (bytes, _) = bytes.as_chunks::<4>();
    let out = out.with_len(bytes.len()).iter_mut();
    out.zip(bytes).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
}

/// u32s that came down.
pub fn integers(bytes: &[u8], out: &mut Vec<u32>) {
    out.clear();
    out.extend(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
}
