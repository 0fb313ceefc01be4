//! Weights as small codes beside factors: value = (code − zero) · factor, where a factor and a
//! zero serve a block of a matrix. All published formats are of this kind; they differ in how the
//! codes lie, what a block is, and where the result is rounded.

use std::sync::Arc;

use half::{bf16, f16};

use super::Encoding;
use super::floats::Table;
use super::packed::Packed;
use crate::Result;
use crate::convert::checkpoint::{Checkpoint, HfTensor};
use crate::gguf::TensorType;

/// A tensor of codes with what gives them their values. Rows of all matrices are counted through.
#[derive(Clone, Debug)]
pub struct Scaled {
    pub codes: Codes,
    pub grid: Grid,
    pub factors: Factors,
    pub zeros: Option<Zeros>,
    pub then: Then,
    /// The float type that the result is rounded to.
    pub result: TensorType,
}

/// The places of codes in a tensor's bytes.
#[derive(Clone, Debug)]
pub enum Codes {
    /// Elements in their order, one a byte.
    Bytes(Table),
    /// Elements in their order, two a byte.
    Nibbles {
        values: Table,
        high_first: bool,
    },
    /// Rows 2i in the low halves of a row of bytes, rows 2i + 1 in its high halves.
    RowPairs(Table),
    Packed(Packed),
}

/// The blocks of elements that share a factor: `height` rows by `width` columns, of which a matrix
/// of `rows` by `columns` has `down` by `across`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub rows: u64,
    pub columns: u64,
    pub height: u64,
    pub width: u64,
}

impl Grid {
    pub fn down(&self) -> u64 {
        self.rows.div_ceil(self.height)
    }

    pub fn across(&self) -> u64 {
        self.columns.div_ceil(self.width)
    }

    /// The line of blocks that a row is in.
    fn line(&self, row: u64) -> u64 {
        row / self.rows * self.down() + row % self.rows / self.height
    }
}

/// A factor for each block.
#[derive(Clone, Debug)]
pub struct Factors {
    pub tensor: Box<HfTensor>,
    /// Whether the tensor is [across, down] and not [down, across].
    pub transposed: bool,
    /// The block of each column, where columns of a block do not lie together.
    pub order: Option<Box<HfTensor>>,
    /// Factors of the factors, one for all or one a matrix.
    pub of_matrix: Option<Arc<[f32]>>,
    /// Whether those divide.
    pub divide: bool,
}

impl Factors {
    pub fn of(tensor: HfTensor) -> Factors {
        let tensor = Box::new(tensor);
        Factors { tensor, transposed: false, order: None, of_matrix: None, divide: false }
    }

    /// The factor of a matrix's factors as one to multiply by.
    pub fn matrix_factors(&self) -> Vec<f32> {
        let of_matrix = self.of_matrix.iter().flat_map(|of| of.iter());
        of_matrix.map(|x| if self.divide { 1.0 / x } else { *x }).collect()
    }
}

/// A zero for each block.
#[derive(Clone, Debug)]
pub enum Zeros {
    /// Numbers that lie as the factors do.
    Plain(Box<HfTensor>),
    Packed(Box<HfTensor>, Packed),
}

/// A last step for each product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Then {
    Nothing,
    Times(f32),
    Plus(f32),
}

/// Lines of blocks and blocks of each that some elements are in: the first and how many.
#[derive(Clone, Copy)]
struct BlockRange {
    line: u64,
    n_lines: u64,
    block: u64,
    n_blocks: u64,
}

impl Checkpoint {
    /// Reads `out.len()` elements from element `first` on.
    pub(super) fn read_scaled(
        &self,
        tensor: &HfTensor,
        scaled: &Scaled,
        first: u64,
        out: &mut [f32],
    ) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        self.read_codes(tensor, scaled, first, out)?;
        let grid = &scaled.grid;
        let end = first + out.len() as u64;
        let (low, high) = (first / grid.columns, (end - 1) / grid.columns);
        let order = self.read_order(&scaled.factors)?;
        let line = grid.line(low);
        let mut part = BlockRange {
            line,
            n_lines: grid.line(high) - line + 1,
            block: 0,
            n_blocks: grid.across(),
        };
        if low == high && order.is_none() {
            part.block = first % grid.columns / grid.width;
            part.n_blocks = (end - 1) % grid.columns / grid.width - part.block + 1;
        }
        let factors = self.read_factors(scaled, part)?;
        let zeros = self.read_zeros(scaled, part)?;
        let mut rest = &mut out[..];
        for row in low..=high {
            let from = first.max(row * grid.columns) - row * grid.columns;
            let to = end.min((row + 1) * grid.columns) - row * grid.columns;
            let (now, after) = rest.split_at_mut((to - from) as usize);
            let at = ((grid.line(row) - part.line) * part.n_blocks) as usize;
            let of_line = at..at + part.n_blocks as usize;
            let blocks = Blocks {
                factors: &factors[of_line.clone()],
                zeros: zeros.as_ref().map(|zeros| &zeros[of_line]),
            };
            match &order {
                Some(order) => blocks.apply_in_order(&order[from as usize..to as usize], now),
                None => blocks.apply(from - part.block * grid.width, grid.width, now),
            }
            rest = after;
        }
        scaled.finish(out);
        Ok(())
    }

    fn read_codes(
        &self,
        tensor: &HfTensor,
        scaled: &Scaled,
        first: u64,
        out: &mut [f32],
    ) -> Result<()> {
        match &scaled.codes {
            Codes::Bytes(values) => {
                let mut bytes = vec![0; out.len()];
                self.read_bytes(tensor, first, &mut bytes)?;
                for (out, byte) in out.iter_mut().zip(bytes) {
                    *out = values[usize::from(byte)];
                }
                Ok(())
            }
            Codes::Nibbles { values, high_first } => {
                let end = first + out.len() as u64;
                let mut bytes = vec![0; (end.div_ceil(2) - first / 2) as usize];
                self.read_bytes(tensor, first / 2, &mut bytes)?;
                let flip = u64::from(*high_first);
                for (i, out) in (first % 2..).zip(out) {
                    let code = bytes[(i / 2) as usize] >> (4 * ((i % 2) ^ flip)) & 0xf;
                    *out = values[usize::from(code)];
                }
                Ok(())
            }
            Codes::RowPairs(values) => {
                let columns = scaled.grid.columns;
                let end = first + out.len() as u64;
                let (low, high) = (first / columns / 2, (end - 1) / columns / 2);
                let mut bytes = vec![0; ((high - low + 1) * columns) as usize];
                self.read_bytes(tensor, low * columns, &mut bytes)?;
                for (i, out) in (first..).zip(out) {
                    let (row, column) = (i / columns, i % columns);
                    let byte = bytes[((row / 2 - low) * columns + column) as usize];
                    *out = values[usize::from(byte >> (4 * (row % 2)) & 0xf)];
                }
                Ok(())
            }
            Codes::Packed(packed) => {
                let (rows, columns) = (scaled.grid.rows, scaled.grid.columns);
                let (low, skip) = (first / columns, (first % columns) as usize);
                let n = (skip + out.len()).div_ceil(columns as usize);
                if skip == 0 && out.len() == n * columns as usize {
                    return self.read_packed(tensor, packed, [rows, columns], low, out);
                }
                let mut whole = vec![0.0; n * columns as usize];
                self.read_packed(tensor, packed, [rows, columns], low, &mut whole)?;
                out.copy_from_slice(&whole[skip..skip + out.len()]);
                Ok(())
            }
        }
    }

    fn read_order(&self, factors: &Factors) -> Result<Option<Vec<usize>>> {
        let Some(order) = &factors.order else { return Ok(None) };
        let blocks = self.read_whole(order)?;
        Ok(Some(blocks.into_iter().map(|block| block as usize).collect()))
    }

    /// All elements of a small tensor.
    pub(super) fn read_whole(&self, tensor: &HfTensor) -> Result<Vec<f32>> {
        let mut values = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
        self.read(tensor, 0, &mut values)?;
        Ok(values)
    }

    fn read_factors(&self, scaled: &Scaled, part: BlockRange) -> Result<Vec<f32>> {
        let Factors { tensor, transposed, of_matrix, divide, .. } = &scaled.factors;
        let mut factors = match transposed {
            true => self.read_transposed(tensor, scaled.grid.down(), part)?,
            false => self.read_blocks_of(tensor, &scaled.grid, part)?,
        };
        let Some(of_matrix) = of_matrix else { return Ok(factors) };
        let lines = factors.chunks_exact_mut(part.n_blocks as usize);
        for (line, factors) in (part.line..).zip(lines) {
            let matrix = if of_matrix.len() == 1 { 0 } else { line / scaled.grid.down() };
            let of = of_matrix[matrix as usize];
            match divide {
                true => factors.iter_mut().for_each(|x| *x /= of),
                false => factors.iter_mut().for_each(|x| *x *= of),
            }
        }
        Ok(factors)
    }

    fn read_zeros(&self, scaled: &Scaled, part: BlockRange) -> Result<Option<Vec<f32>>> {
        let grid = &scaled.grid;
        match &scaled.zeros {
            None => Ok(None),
            Some(Zeros::Plain(zeros)) => self.read_blocks_of(zeros, grid, part).map(Some),
            Some(Zeros::Packed(tensor, packed)) => {
                let across = grid.across();
                let mut zeros = vec![0.0; (part.n_lines * across) as usize];
                let shape = [grid.down(), across];
                self.read_packed(tensor, packed, shape, part.line, &mut zeros)?;
                if part.n_blocks == across {
                    return Ok(Some(zeros));
                }
                let wanted = part.block as usize..(part.block + part.n_blocks) as usize;
                Ok(Some(zeros[wanted].to_vec()))
            }
        }
    }

    /// Reads numbers that lie as [down, across]. A part of a line is a part of one line.
    fn read_blocks_of(&self, tensor: &HfTensor, grid: &Grid, part: BlockRange) -> Result<Vec<f32>> {
        let mut values = vec![0.0; (part.n_lines * part.n_blocks) as usize];
        self.read(tensor, part.line * grid.across() + part.block, &mut values)?;
        Ok(values)
    }

    /// Reads numbers that lie as [across, down].
    fn read_transposed(&self, tensor: &HfTensor, down: u64, part: BlockRange) -> Result<Vec<f32>> {
        let (n_lines, n_blocks) = (part.n_lines as usize, part.n_blocks as usize);
        let mut values = vec![0.0; n_lines * n_blocks];
        let mut column = vec![0.0; n_lines];
        for block in 0..n_blocks {
            self.read(tensor, (part.block + block as u64) * down + part.line, &mut column)?;
            for (line, value) in column.iter().enumerate() {
                values[line * n_blocks + block] = *value;
            }
        }
        Ok(values)
    }
}

/// The factors and zeros of a line of blocks.
struct Blocks<'a> {
    factors: &'a [f32],
    zeros: Option<&'a [f32]>,
}

impl Blocks<'_> {
    /// Gives codes from column `first` on their values.
    fn apply(&self, first: u64, width: u64, codes: &mut [f32]) {
        let (mut block, mut rest) = ((first / width) as usize, codes);
        let mut n = (width - first % width) as usize;
        while !rest.is_empty() {
            let (now, after) = rest.split_at_mut(n.min(rest.len()));
            let (factor, zero) = (self.factors[block], self.zeros.map_or(0.0, |z| z[block]));
            match self.zeros {
                Some(_) => now.iter_mut().for_each(|x| *x = (*x - zero) * factor),
                None => now.iter_mut().for_each(|x| *x *= factor),
            }
            (block, rest, n) = (block + 1, after, width as usize);
        }
    }

    fn apply_in_order(&self, order: &[usize], codes: &mut [f32]) {
        for (x, block) in codes.iter_mut().zip(order) {
            *x = (*x - self.zeros.map_or(0.0, |z| z[*block])) * self.factors[*block];
        }
    }
}

impl Scaled {
    fn finish(&self, out: &mut [f32]) {
        match self.then {
            Then::Nothing => {}
            Then::Times(x) => out.iter_mut().for_each(|v| *v *= x),
            Then::Plus(x) => out.iter_mut().for_each(|v| *v += x),
        }
        match self.result {
            TensorType::F16 => out.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32()),
            TensorType::BF16 => out.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
            _ => {}
        }
    }

    /// The float type that is as wide as the factors'.
    pub fn float_type(&self) -> TensorType {
        let of_factors = self.factors.tensor.encoding.as_ref().map(Encoding::float_type);
        match (self.result, of_factors) {
            (TensorType::F16, _) | (_, Some(TensorType::F16)) => TensorType::F16,
            _ => TensorType::BF16,
        }
    }

    /// Rows that are best read together, because their words lie side by side in lines far apart.
    pub fn rows_together(&self) -> u64 {
        use super::packed::Order;
        match &self.codes {
            Codes::Packed(packed) => match packed.order {
                Order::RowsApart => 64,
                Order::ColumnsApart | Order::Awq => 256,
                Order::Rows | Order::Columns => 1,
            },
            _ => 1,
        }
    }
}
