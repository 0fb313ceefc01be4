//! Tensors through the machine in row chunks: make, write. The chunks of one
//! tensor are worked on by all processors; while one is written the next is computed. Memory is
//! two chunks and a buffer a thread, whatever the model's size.

use rayon::prelude::*;

use crate::gguf::{TensorType, Writer};
use crate::quant;
use crate::terminal::Bar;
use crate::{Result, interrupt};

/// The columns' weights of one tensor: a row for each of its matrices.
pub struct Importance {
    pub columns: Vec<f32>,
    /// Rows of the tensor that belong to one matrix.
    pub rows: u64,
}

/// Elements that a thread takes at a time: a few hundred rows of a small model, some dozens of a
/// large one, and f32 buffers that stay in the second-level cache's neighbourhood (1 MiB).
const PIECE_ELEMENTS: usize = 1 << 18;

/// Elements of a chunk: enough pieces to share among the threads of a workstation, and 32 MiB at
/// most once they are stored.
const CHUNK_ELEMENTS: usize = 32 * PIECE_ELEMENTS;

/// One tensor to write.
pub struct TensorJob<'a> {
    pub name: &'a str,
    pub ty: TensorType,
    pub row_len: usize,
    pub n_rows: u64,
    /// Rows that must be made together, counted from the tensor's start; divides `n_rows`.
    pub unit_rows: usize,
    /// Writes whole units from row `first` on as stored, and answers how many of their values were
    /// not finite. Pieces have the same bounds whatever the number of threads.
    pub make: Make<'a>,
}

/// Fills whole rows from a given one on and answers how many values were odd.
pub type Make<'a> = Box<dyn Fn(u64, &mut [u8]) -> Result<usize> + Send + Sync + 'a>;

impl<'a> TensorJob<'a> {
    /// A job of rows that can be made one by one.
    pub fn of_rows(name: &'a str, dims: &[u64], ty: TensorType, make: Make<'a>) -> TensorJob<'a> {
        let (row_len, n_rows) = (dims[0] as usize, dims[1..].iter().product());
        TensorJob { name, ty, row_len, n_rows, unit_rows: 1, make }
    }

    fn row_bytes(&self) -> usize {
        // The writer has accepted the type for this row length.
        self.ty.row_bytes(self.row_len as u64).expect("whole blocks in a row") as usize
    }

    fn piece_rows(&self) -> usize {
        let unit = self.unit_rows * self.row_len;
        self.unit_rows * (PIECE_ELEMENTS / unit.max(1)).max(1)
    }

    fn chunk_rows(&self) -> usize {
        let piece = self.piece_rows();
        piece * (CHUNK_ELEMENTS / (piece * self.row_len)).max(1)
    }

    /// Rows from `first` on, at most a chunk.
    fn chunk(&self, first: u64) -> Result<(Vec<u8>, usize)> {
        let (piece, row_bytes) = (self.piece_rows(), self.row_bytes());
        let rows = (self.n_rows - first).min(self.chunk_rows() as u64) as usize;
        let mut out = vec![0; rows * row_bytes];
        let odd = out
            .par_chunks_mut(piece * row_bytes)
            .enumerate()
            .map(|(i, bytes)| (self.make)(first + (i * piece) as u64, bytes))
            .try_reduce(|| 0, |a, b| Ok(a + b))?;
        Ok((out, odd))
    }
}

/// The `make` of a job whose values come as f32: `fill` writes those of whole units from row
/// `first` on.
pub fn from_values<'a>(
    ty: TensorType,
    row_len: usize,
    fill: impl Fn(u64, &mut [f32]) -> Result<()> + Send + Sync + 'a,
) -> Make<'a> {
    from_weighted_values(ty, row_len, None, fill)
}

/// `from_values` with `importance`, which has `row_len` columns for each matrix of the tensor.
pub fn from_weighted_values<'a>(
    ty: TensorType,
    row_len: usize,
    importance: Option<Importance>,
    fill: impl Fn(u64, &mut [f32]) -> Result<()> + Send + Sync + 'a,
) -> Make<'a> {
    let row_bytes = ty.row_bytes(row_len as u64).expect("whole blocks in a row") as usize;
    Box::new(move |first, bytes| {
        let mut values = vec![0.0; bytes.len() / row_bytes * row_len];
        fill(first, &mut values)?;
        Ok(match &importance {
            Some(importance) => weighted(ty, row_len, importance, first, &values, bytes),
            None => quant::quantize(ty, &values, bytes),
        })
    })
}

/// Quantises rows from `first` on, each with the weights of the matrix that it belongs to.
fn weighted(
    ty: TensorType,
    row_len: usize,
    importance: &Importance,
    first: u64,
    values: &[f32],
    bytes: &mut [u8],
) -> usize {
    let row_bytes = bytes.len() / (values.len() / row_len);
    let (mut row, mut values, mut bytes, mut odd) = (first, values, bytes, 0);
    while !values.is_empty() {
        let (matrix, within) = (row / importance.rows, row % importance.rows);
        let columns = &importance.columns[matrix as usize * row_len..][..row_len];
        let n = (importance.rows - within).min((values.len() / row_len) as u64);
        let (now, later) = values.split_at(n as usize * row_len);
        let (out, rest) = bytes.split_at_mut(n as usize * row_bytes);
        odd += quant::quantize_weighted(ty, now, Some(columns), row_len, out);
        (row, values, bytes) = (row + n, later, rest);
    }
    odd
}

/// Writes a declared tensor.
pub fn stream(writer: &mut Writer, job: &TensorJob<'_>, progress: &Bar) -> Result<()> {
    writer.begin_tensor(job.name)?;
    let step = job.chunk_rows() as u64;
    let (mut ready, mut odd) = job.chunk(0)?;
    let mut next = step;
    loop {
        interrupt::check()?;
        let more = next < job.n_rows;
        let compute = || if more { job.chunk(next).map(Some) } else { Ok(None) };
        let (written, computed) = rayon::join(|| writer.write(&ready), compute);
        written?;
        progress.inc(ready.len() as u64);
        let Some((bytes, n)) = computed? else { break };
        ready = bytes;
        odd += n;
        next += step;
    }
    warn_of_odd_values(job, odd);
    writer.end_tensor()
}

fn warn_of_odd_values(job: &TensorJob<'_>, odd: usize) {
    if odd > 0 {
        let kept = if job.ty.block_len() == 1 { "are kept" } else { "became 0" };
        log::warn!("{}: {odd} values are NaN or infinite and {kept}", job.name);
    }
}

/// A tensor's bytes in order, in portions of the caller's choice. They are made in the chunks that
/// `stream` makes, and so are the same.
pub struct Feed<'a> {
    job: TensorJob<'a>,
    next: u64,
    /// Made and, from `taken` on, not taken yet.
    ready: Vec<u8>,
    taken: usize,
    odd: usize,
}

impl<'a> Feed<'a> {
    pub fn new(job: TensorJob<'a>) -> Feed<'a> {
        Feed { job, next: 0, ready: Vec::new(), taken: 0, odd: 0 }
    }

    /// The next `n` bytes, which there must be.
    pub fn take(&mut self, n: usize) -> Result<&[u8]> {
        if self.ready.len() - self.taken < n {
            self.ready.drain(..self.taken);
            self.taken = 0;
        }
        while self.ready.len() < n {
            interrupt::check()?;
            assert!(self.next < self.job.n_rows, "{}: more bytes than there are", self.job.name);
            let (bytes, odd) = self.job.chunk(self.next)?;
            self.next += self.job.chunk_rows() as u64;
            self.odd += odd;
            match self.ready.is_empty() {
                true => self.ready = bytes,
                false => self.ready.extend(bytes),
            }
        }
        self.taken += n;
        Ok(&self.ready[self.taken - n..self.taken])
    }

    pub fn warn_of_odd_values(&self) {
        warn_of_odd_values(&self.job, self.odd);
    }
}
