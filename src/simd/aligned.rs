//! Memory that begins on a cache line. A `Vec` of floats does not: vectors of 64 bytes would each
//! lie on two lines.

use std::ops::{Deref, DerefMut};

/// A cache line: the unit of allocation.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

/// Bytes on a cache line boundary, cast to plain numbers; grows, never shrinks.
#[derive(Default)]
pub(super) struct AlignedBytes(Vec<Line>);

impl AlignedBytes {
    pub(super) fn reserve(&mut self, bytes: usize) {
        let lines = bytes.div_ceil(64);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0; 64]));
        }
    }

    pub(super) fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len() * 64
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: lines are 64 bytes each, one behind the other, and all were written.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; any byte is a byte of a line, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len()) }
    }
}

/// Results of products, from a cache line on: kernels write those of many tokens past the caches
/// (see [`super::Out`]). Otherwise as a `Vec` that never gives its memory back.
#[derive(Default)]
pub struct Floats {
    bytes: AlignedBytes,
    len: usize,
}

impl Floats {
    /// New ones are 0.
    pub fn resize(&mut self, len: usize) {
        let before = std::mem::replace(&mut self.len, len);
        self.bytes.reserve(size_of::<f32>() * len);
        self[before.min(len)..].fill(0.0);
    }

    /// Takes copies of these values instead of its own.
    pub fn copy_from<'a>(&mut self, values: impl Iterator<Item = &'a [f32]> + Clone) {
        self.resize(values.clone().map(<[f32]>::len).sum());
        let mut rest = &mut self[..];
        for values in values {
            let (first, more) = rest.split_at_mut(values.len());
            first.copy_from_slice(values);
            rest = more;
        }
    }
}

/// A buffer for as many floats as one wants.
pub trait FloatBuffer {
    /// All of it, of this length from now on.
    fn with_len(&mut self, len: usize) -> &mut [f32];
}

impl FloatBuffer for Vec<f32> {
    fn with_len(&mut self, len: usize) -> &mut [f32] {
        self.resize(len, 0.0);
        self
    }
}

impl FloatBuffer for Floats {
    fn with_len(&mut self, len: usize) -> &mut [f32] {
        self.resize(len);
        self
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        debug_assert!(size_of::<f32>() * self.len <= self.bytes.len());
        // SAFETY: `resize` made room for so many; the bytes were written, any are a float, and a
        // line begins where a float may.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        debug_assert!(size_of::<f32>() * self.len <= self.bytes.len());
        // SAFETY: as in `deref`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_mut_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_keep_what_a_vec_would() {
        let mut floats = Floats::default();
        assert!(floats.is_empty());
        for (len, written) in [(3, 1.0), (40, 2.0), (17, 3.0), (33, 4.0), (0, 5.0), (50, 6.0)] {
            let before = floats.to_vec();
            floats.resize(len);
            let mut want = before;
            want.resize(len, 0.0);
            assert_eq!(floats[..], want[..]);
            assert!(floats.as_ptr().addr().is_multiple_of(64));
            floats.fill(written);
        }
        let (a, b) = ([1.0, 2.0], [3.0; 20]);
        floats.copy_from([&a[..], &b].into_iter());
        assert_eq!(floats[..], [&a[..], &b].concat());
    }
}
