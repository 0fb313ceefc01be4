//! Matrices of integers of 1 to 8 bits in 32-bit words: code i of a run takes bits `i · bits` and
//! up of the run's words, so it may lie in two of them.

use crate::Result;
use crate::convert::checkpoint::{Checkpoint, HfTensor};

/// How a matrix of codes lies in its words.
#[derive(Clone, Debug)]
pub struct Packed {
    pub bits: u32,
    pub order: Order,
    /// Added to a code, which then keeps its lowest `bits` bits.
    pub plus: u32,
    /// Subtracted then.
    pub minus: i32,
}

/// Which codes share a run of words, and where runs lie. Rows and columns are the matrix's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Each row is a run; words are [row][word].
    Rows,
    /// Each row is a run; words are [word][row].
    RowsApart,
    /// Each column is a run; words are [word][column].
    Columns,
    /// Each column is a run; words are [column][word].
    ColumnsApart,
    /// AWQ's order of the eight codes in a word, in lines as `ColumnsApart` has them.
    Awq,
}

/// The place of code i of eight in AWQ's order.
const AWQ_PLACES: [u64; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Bytes between two wanted runs that are read as well, which costs less than another call.
const MAX_GAP: u64 = 1 << 13;

/// Bytes of a read over gaps.
const MAX_READ: u64 = 1 << 20;

/// Words that codes take.
pub fn words(codes: u64, bits: u32) -> u64 {
    codes.saturating_mul(u64::from(bits)).div_ceil(32)
}

impl Packed {
    /// The shape of the words of a matrix.
    pub fn shape(&self, rows: u64, columns: u64) -> [u64; 2] {
        match self.order {
            Order::Rows => [rows, words(columns, self.bits)],
            Order::RowsApart => [words(columns, self.bits), rows],
            Order::Columns => [words(rows, self.bits), columns],
            Order::ColumnsApart | Order::Awq => [columns, words(rows, self.bits)],
        }
    }

    fn place(&self, i: u64) -> u64 {
        match self.order {
            Order::Awq => i / 8 * 8 + AWQ_PLACES[(i % 8) as usize],
            _ => i,
        }
    }

    /// The value of the code that starts at a bit of a run whose words are `stride` apart.
    #[inline]
    fn at_bit(&self, words: &[u32], stride: usize, bit: u64) -> f32 {
        let (at, shift) = ((bit / 32) as usize * stride, (bit % 32) as u32);
        let mut code = words[at] >> shift;
        if shift + self.bits > 32 {
            code |= words[at + stride] << (32 - shift);
        }
        let mask = (1 << self.bits) - 1;
        ((code.wrapping_add(self.plus) & mask) as i32 - self.minus) as f32
    }

    /// The values of a run whose words are `stride` apart.
    fn run(&self, words: &[u32], stride: usize, out: &mut [f32]) {
        let bits = u64::from(self.bits);
        (0..).zip(out).for_each(|(i, out)| *out = self.at_bit(words, stride, i * bits));
    }
}

impl Checkpoint {
    /// Fills `out` with whole rows of a matrix of `shape`, rows and columns, from row `first` on.
    pub fn read_packed(
        &self,
        tensor: &HfTensor,
        packed: &Packed,
        shape: [u64; 2],
        first: u64,
        out: &mut [f32],
    ) -> Result<()> {
        let [rows, columns] = shape;
        let n = out.len() / columns as usize;
        let [lines, width] = packed.shape(rows, columns);
        let bits = u64::from(packed.bits);
        // Lines of words, words of each, and the number of the first code in them.
        let (line, n_lines, word, n_words, skipped) = match packed.order {
            Order::Rows => (first, n as u64, 0, width, 0),
            Order::RowsApart => (0, lines, first, n as u64, 0),
            Order::Columns => {
                let (from, to) = (first * bits / 32, words(first + n as u64, packed.bits));
                (from, to - from, 0, width, from * 32)
            }
            Order::ColumnsApart | Order::Awq => {
                let from = first / 8 * 8 * bits / 32;
                let to = words((first + n as u64).next_multiple_of(8), packed.bits).min(width);
                (0, lines, from, to - from, from * 32)
            }
        };
        let start = (line * width + word) * 4;
        let words = self.read_words(tensor, start, [n_lines, n_words, width])?;
        let stride = n_words as usize;
        for (row, out) in out.chunks_exact_mut(columns as usize).enumerate() {
            match packed.order {
                Order::Rows => packed.run(&words[row * stride..][..stride], 1, out),
                Order::RowsApart => packed.run(&words[row..], stride, out),
                Order::Columns | Order::ColumnsApart | Order::Awq => {
                    // The words before are not here.
                    let bit = packed.place(first + row as u64) * bits - skipped;
                    let (apart, along) = match packed.order {
                        Order::Columns => (1, stride),
                        _ => (stride, 1),
                    };
                    for (column, out) in out.iter_mut().enumerate() {
                        *out = packed.at_bit(&words[column * apart..], along, bit);
                    }
                }
            }
        }
        Ok(())
    }

    /// Words of lines that lie `width` words apart, without those between.
    fn read_words(
        &self,
        tensor: &HfTensor,
        start: u64,
        [lines, wanted, width]: [u64; 3],
    ) -> Result<Vec<u32>> {
        let (wanted, width) = (wanted as usize * 4, width as usize * 4);
        let mut bytes = vec![0; lines as usize * wanted];
        if wanted == width {
            self.read_bytes(tensor, start, &mut bytes)?;
        } else if (width - wanted) as u64 > MAX_GAP {
            for (line, bytes) in (0..).zip(bytes.chunks_exact_mut(wanted)) {
                self.read_bytes(tensor, start + line * width as u64, bytes)?;
            }
        } else {
            let together = (MAX_READ as usize / width).max(1);
            let mut read = Vec::new();
            for (part, bytes) in (0..).zip(bytes.chunks_mut(together * wanted)) {
                let lines = bytes.len() / wanted;
                read.resize((lines - 1) * width + wanted, 0);
                self.read_bytes(tensor, start + (part * together * width) as u64, &mut read)?;
                for (bytes, read) in bytes.chunks_exact_mut(wanted).zip(read.chunks(width)) {
                    bytes.copy_from_slice(&read[..wanted]);
                }
            }
        }
        let word = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        Ok(bytes.chunks_exact(4).map(word).collect())
    }
}
