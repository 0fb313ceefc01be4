//! Values as a trace keeps them.

use super::Precision;
use half::f16;

const LEVELS: f32 = 255.0;
const SCALE_BYTES: usize = 4;

impl Precision {
    /// Bytes of one probability.
    pub(super) fn prob_bytes(self) -> usize {
        match self {
            Precision::Compact => 1,
            Precision::Exact => 4,
        }
    }

    /// Bytes of one value of a vector.
    pub(super) fn value_bytes(self) -> usize {
        match self {
            Precision::Compact => 2,
            Precision::Exact => 4,
        }
    }

    pub(super) fn put_probs(self, probs: &[f32], out: &mut [u8]) {
        match self {
            Precision::Compact => {
                assert_eq!(probs.len(), out.len());
                out.iter_mut().zip(probs).for_each(|(q, &p)| *q = quantised(p));
            }
            Precision::Exact => put_f32s(probs, out),
        }
    }

    /// Replaces the contents of `out`.
    pub(super) fn get_probs(self, bytes: &[u8], out: &mut Vec<f32>) {
        out.clear();
        match self {
            Precision::Compact => {
                out.extend(bytes.iter().map(|&q| dequantised(q)));
                let sum: f32 = out.iter().sum();
                // Where nothing is left of any probability, all were about as small.
                let (scale, shift) =
                    if sum > 0.0 { (1.0 / sum, 0.0) } else { (0.0, 1.0 / out.len() as f32) };
                out.iter_mut().for_each(|p| *p = *p * scale + shift);
            }
            Precision::Exact => out.extend(f32s(bytes)),
        }
    }

    /// An embedding's row in a block: values of so many bytes each. The compact form is a scale,
    /// f32, and for each value one signed byte, of which 127 is the largest of the row.
    pub(super) fn embedding_row(self, n_embd: usize) -> (usize, usize) {
        match self {
            Precision::Compact => (SCALE_BYTES + n_embd, 1),
            Precision::Exact => (n_embd, 4),
        }
    }

    pub(super) fn put_embedding(self, values: &[f32], out: &mut [u8]) {
        if self == Precision::Exact {
            return put_f32s(values, out);
        }
        let (scale_out, out) = out.split_at_mut(SCALE_BYTES);
        assert_eq!(values.len(), out.len());
        let scale = values.iter().fold(0f32, |max, v| max.max(v.abs())) / f32::from(i8::MAX);
        scale_out.copy_from_slice(&scale.to_le_bytes());
        // Of a row of zeros the scale is 0, and so is NaN as an i8.
        out.iter_mut().zip(values).for_each(|(q, v)| *q = (v / scale).round() as i8 as u8);
    }

    /// Appends rows of embeddings to `out`.
    pub(super) fn extend_embeddings(self, rows: &[u8], n_embd: usize, out: &mut Vec<f32>) {
        if self == Precision::Exact {
            return out.extend(f32s(rows));
        }
        for row in rows.chunks_exact(SCALE_BYTES + n_embd) {
            let (scale, row) = row.split_at(SCALE_BYTES);
            let scale: f32 = f32s(scale).sum();
            out.extend(row.iter().map(|q| f32::from(*q as i8) * scale));
        }
    }

    pub(super) fn put_values(self, values: &[f32], out: &mut [u8]) {
        match self {
            Precision::Compact => {
                assert_eq!(2 * values.len(), out.len());
                for (out, &value) in out.chunks_exact_mut(2).zip(values) {
                    // What is too large for an f16 becomes its largest.
                    let value = value.clamp(f16::MIN.to_f32(), f16::MAX.to_f32());
                    out.copy_from_slice(&f16::from_f32(value).to_le_bytes());
                }
            }
            Precision::Exact => put_f32s(values, out),
        }
    }

    /// Appends to `out`.
    pub(super) fn extend_values(self, bytes: &[u8], out: &mut Vec<f32>) {
        match self {
            Precision::Compact => out.extend(f16s(bytes).map(f16::to_f32)),
            Precision::Exact => out.extend(f32s(bytes)),
        }
    }

    /// Whether these are finite and not negative.
    pub(super) fn probs_are_sound(self, bytes: &[u8]) -> bool {
        self == Precision::Compact || f32s(bytes).all(|p| p.is_finite() && p >= 0.0)
    }

    pub(super) fn embeddings_are_finite(self, rows: &[u8], n_embd: usize) -> bool {
        match self {
            Precision::Compact => rows
                .chunks_exact(SCALE_BYTES + n_embd)
                .all(|row| f32s(&row[..SCALE_BYTES]).all(f32::is_finite)),
            Precision::Exact => f32s(rows).all(f32::is_finite),
        }
    }

    pub(super) fn values_are_finite(self, bytes: &[u8]) -> bool {
        match self {
            Precision::Compact => f16s(bytes).all(f16::is_finite),
            Precision::Exact => f32s(bytes).all(f32::is_finite),
        }
    }
}

/// The nearest level; p outside 0 to 1 as the end that is nearer, NaN as 0.
pub(super) fn quantised(p: f32) -> u8 {
    (p.clamp(0.0, 1.0).sqrt() * LEVELS).round() as u8
}

pub(super) fn dequantised(q: u8) -> f32 {
    let root = f32::from(q) / LEVELS;
    root * root
}

fn put_f32s(values: &[f32], out: &mut [u8]) {
    assert_eq!(4 * values.len(), out.len());
    for (out, value) in out.chunks_exact_mut(4).zip(values) {
        out.copy_from_slice(&value.to_le_bytes());
    }
}

fn f32s(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")))
}

fn f16s(bytes: &[u8]) -> impl Iterator<Item = f16> {
    bytes.chunks_exact(2).map(|b| f16::from_le_bytes(b.try_into().expect("two bytes")))
}
