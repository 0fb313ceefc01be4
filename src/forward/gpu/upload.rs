//! Pinned host memory for a pass's small uploads and downloads.

use crate::Result;
use crate::backend::gpu::{Device, DeviceSlice, Pinned, PinnedKind, Stream};
use crate::simd::FloatBuffer;

const LINE: usize = 64;

/// Upload memory is handed out piece by piece. All of it is free again when the stream has been
/// waited for.
pub struct Staging {
    up: Pinned,
    down: Pinned,
    used: usize,
}

impl Staging {
    /// Allocates `bytes` for uploads and `down_bytes` for downloads. More uploads are possible
    /// between two waits; they then wait themselves. A download must fit.
    pub fn new(gpu: &Device, bytes: usize, down_bytes: usize) -> Result<Staging> {
        let pinned = |bytes| Pinned::of(gpu, bytes, PinnedKind::Cached, "a micro-batch (-ub)");
        let (up, down) = (pinned(bytes.next_multiple_of(LINE))?, pinned(down_bytes.max(LINE))?);
        Ok(Staging { up, down, used: 0 })
    }

    /// Queues an upload of f32s, u32s or u64s. They are copied to the staging buffer now.
    ///
    /// # Panics
    /// If they do not fit the staging buffer.
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
        let range = self.used..self.used + n_bytes;
        self.used = range.end.next_multiple_of(LINE);
        // SAFETY: these bytes are not in use since the last wait, and do not change until the next
        // one.
        unsafe {
            let staged = self.up.bytes_mut(range);
            for (staged, value) in staged.as_chunks_mut::<N>().0.iter_mut().zip(values) {
                *staged = bytes(*value);
            }
            stream.upload(to, staged)
        }
    }

    /// Queues uploads of any number of f32s.
    pub fn upload_floats(
        &mut self,
        stream: &Stream,
        to: DeviceSlice,
        values: &[f32],
    ) -> Result<()> {
        let most = self.up.len() / 4;
        for (i, values) in values.chunks(most).enumerate() {
            let start = 4 * most * i;
            let to = to.slice(start..start + 4 * values.len());
            self.upload(stream, to, values, f32::to_le_bytes)?;
        }
        Ok(())
    }

    /// Downloads any number of f32s, which are all that `to` holds then, and waits for them.
    pub fn download_floats(
        &mut self,
        stream: &Stream,
        from: DeviceSlice,
        to: &mut impl FloatBuffer,
    ) -> Result<()> {
        let to = to.with_len(from.count::<f32>());
        let most = self.down.len() / 4;
        for (i, to) in to.chunks_mut(most).enumerate() {
            let start = 4 * most * i;
            let part = from.slice(start..start + 4 * to.len());
            self.download(stream, &[part], &mut |_, bytes| copy_floats(bytes, to))?;
        }
        Ok(())
    }

    /// Waits for the stream. Then the whole staging buffer is free.
    pub fn wait(&mut self, stream: &Stream) -> Result<()> {
        stream.synchronize_watched()?;
        self.used = 0;
        Ok(())
    }

    /// Downloads several parts and waits for them. `take` gets each, in order.
    pub fn download(
        &mut self,
        stream: &Stream,
        parts: &[DeviceSlice],
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        let sizes: Vec<usize> = parts.iter().map(|part| part.len()).collect();
        for (part, at) in parts.iter().zip(starts(&sizes)) {
            assert!(at + part.len() <= self.down.len(), "{} bytes to download", part.len());
            // SAFETY: the part fits the buffer, by the assertion. The buffer is not used before the
            // wait below.
            unsafe { stream.download(self.down.as_ptr().add(at), *part)? };
        }
        self.wait(stream)?;
        for (i, (at, size)) in starts(&sizes).zip(&sizes).enumerate() {
            // SAFETY: the copies are done.
            take(i, unsafe { self.down.bytes(at..at + size) });
        }
        Ok(())
    }
}

/// The offsets of parts of these sizes, one behind the other, each at a cache line of its own.
pub fn starts(sizes: &[usize]) -> impl Iterator<Item = usize> {
    sizes.iter().scan(0, |end, size| {
        let start = *end;
        *end = (start + size).next_multiple_of(LINE);
        Some(start)
    })
}

/// Reads downloaded f32s.
pub fn floats(bytes: &[u8], out: &mut impl FloatBuffer) {
    copy_floats(bytes, out.with_len(bytes.len() / 4));
}

fn copy_floats(bytes: &[u8], out: &mut [f32]) {
    let (bytes, _) = bytes.as_chunks::<4>();
    out.iter_mut().zip(bytes).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
}

/// Reads downloaded u32s.
pub fn integers(bytes: &[u8], out: &mut Vec<u32>) {
    out.clear();
    out.extend(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
}
