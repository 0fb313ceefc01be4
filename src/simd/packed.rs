//! Rows of activations as bytes for other machines: a row's values, then its scales, both
//! little-endian. The sums of blocks follow from the values, so they are computed again.

use super::{ActKind, Activations};

impl ActKind {
    /// Bytes of a packed row of `cols` elements.
    pub fn packed_bytes(self, cols: usize) -> usize {
        let (values, scales) = self.parts(cols);
        values + scales
    }

    /// Bytes of a packed row's values and scales.
    fn parts(self, cols: usize) -> (usize, usize) {
        match self {
            ActKind::F32 => (4 * cols, 0),
            ActKind::Q8_0 | ActKind::Q8_K => (cols, 4 * (cols / self.block_len())),
        }
    }
}

impl Activations {
    /// Appends a token's row.
    pub fn pack(&self, token: usize, out: &mut Vec<u8>) {
        assert!(token < self.tokens(), "token {token} of {}", self.tokens());
        let (values, scales) = self.kind().parts(self.cols());
        out.extend_from_slice(&self.values_of(token)[..values]);
        out.extend_from_slice(&self.scales_of(token)[..scales]);
    }

    /// Stores a token's row, of `packed_bytes` bytes.
    pub fn unpack(&mut self, token: usize, packed: &[u8]) {
        assert!(token < self.tokens(), "token {token} of {}", self.tokens());
        let (kind, cols) = (self.kind(), self.cols());
        let (n_values, n_scales) = kind.parts(cols);
        assert_eq!(packed.len(), n_values + n_scales, "a packed row of {cols} columns");
        let (values, scales) = packed.split_at(n_values);
        self.values_of_mut(token)[..n_values].copy_from_slice(values);
        self.scales_of_mut(token)[..n_scales].copy_from_slice(scales);
        let by_16 = (2 * (cols / 32)).next_multiple_of(64);
        let sums = self.sums_of_mut(token);
        match kind {
            ActKind::F32 => {}
            ActKind::Q8_0 => store_sums(values, 32, sums),
            ActKind::Q8_K => {
                store_sums(values, 32, sums);
                store_sums(values, 16, &mut sums[by_16..]);
            }
        }
    }
}

/// The sum of each `n` values, as i16.
fn store_sums(values: &[u8], n: usize, out: &mut [u8]) {
    for (values, out) in values.chunks_exact(n).zip(out.chunks_exact_mut(2)) {
        let sum: i16 = values.iter().map(|value| i16::from(*value as i8)).sum();
        out.copy_from_slice(&sum.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::kernels;

    #[test]
    fn rows_come_back_with_all_that_products_read() {
        let cols = 512;
        let x: Vec<f32> = (0..3 * cols).map(|i| ((i * 37) % 101) as f32 / 7.0 - 6.0).collect();
        for kind in [ActKind::F32, ActKind::Q8_0, ActKind::Q8_K] {
            let (mut from, mut to) = (Activations::new(), Activations::new());
            from.resize(kind, 3, cols);
            from.quantize_rows(kernels(), 0..3, &x, cols);
            to.resize(kind, 2, cols);
            // Some other row was there before.
            to.quantize_rows(kernels(), 0..2, &x, cols);
            let mut packed = Vec::new();
            from.pack(2, &mut packed);
            assert_eq!(packed.len(), kind.packed_bytes(cols));
            to.unpack(1, &packed);
            let (from, to) = (from.all(), to.all());
            if kind == ActKind::F32 {
                assert_eq!(from.f32s(2), to.f32s(1));
                continue;
            }
            assert_eq!(from.qs(2), to.qs(1));
            assert_eq!(from.scales(2), to.scales(1));
            assert_eq!(from.sums32(2), to.sums32(1));
            if kind == ActKind::Q8_K {
                assert_eq!(from.sums16(2), to.sums16(1));
            }
        }
    }
}
