//! How a planned tensor's rows are made from the checkpoint's.

use super::checkpoint::Checkpoint;
use super::encoding::Encoding;
use super::keep::run_len;
use super::lora::{Applied, Changes};
use super::plan::{Piece, Planned, Source};
use super::stream::{self, Make, TensorJob};
use super::view::Runs;
use crate::Result;
use crate::gguf::TensorType;

/// The job that writes a planned tensor as a type, with what adapters change of it.
pub fn job<'a>(
    checkpoint: &'a Checkpoint,
    tensor: &'a Planned,
    ty: TensorType,
    changes: &'a Changes,
) -> TensorJob<'a> {
    let Planned { name, dims, source } = tensor;
    let (row_len, changes) = (dims[0] as usize, changes.of(name));
    let mut job = TensorJob::of_rows(name, dims, ty, Box::new(|_, _| Ok(0)));
    match source {
        Source::Values(values) => {
            job.make = stream::from_values(ty, row_len, move |first, out| {
                let first = first as usize * row_len;
                out.copy_from_slice(&values[first..first + out.len()]);
                Ok(())
            });
        }
        Source::Pieces(pieces) if !changes.is_empty() => {
            let changed = Applied::of(checkpoint, changes);
            job.unit_rows = unit_rows(pieces, row_len as u64);
            job.make = stream::from_values(ty, row_len, move |first, out| {
                let first = first * row_len as u64;
                fill(checkpoint, pieces, first, out)?;
                changed.apply(first, out)
            });
        }
        Source::Pieces(pieces) if is_kept(pieces, ty, row_len as u64) => {
            job.make = repack(checkpoint, pieces, ty, row_len as u64);
        }
        Source::Pieces(pieces) if ty == TensorType::I32 => {
            job.make = Box::new(move |first, out| {
                let mut values = vec![0.0; out.len() / 4];
                fill(checkpoint, pieces, first * row_len as u64, &mut values)?;
                let bytes = values.iter().flat_map(|v| (*v as i32).to_le_bytes());
                out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte);
                Ok(0)
            });
        }
        Source::Pieces(pieces) => {
            job.unit_rows = unit_rows(pieces, row_len as u64);
            job.make = stream::from_values(ty, row_len, move |first, out| {
                fill(checkpoint, pieces, first * row_len as u64, out)
            });
        }
    }
    job
}

/// Elements of rows that are read together at most.
const MOST_TOGETHER: u64 = 1 << 21;

/// Rows that are best read together: those of a block, if all pieces have the same. Elements that
/// are wanted as they lie are read in any portions, but for codes of rows that share words.
fn unit_rows(pieces: &[Piece], row_len: u64) -> usize {
    if pieces.iter().all(|p| p.walk.is_plain()) {
        let together = |p: &Piece| match &p.tensor.encoding {
            Some(Encoding::Scaled(scaled)) => scaled.rows_together(),
            _ => 1,
        };
        let mut n = pieces.iter().map(together).max().unwrap_or(1);
        let fits = |n: u64| pieces.iter().all(|p| p.len.is_multiple_of(n * row_len));
        while n > 1 && (!fits(n) || n * row_len > MOST_TOGETHER) {
            n /= 2;
        }
        return n as usize;
    }
    let block = pieces.first().map_or(1, |p| p.walk.block());
    let alike = pieces.iter().all(|p| p.walk.block() == block && p.len.is_multiple_of(block));
    if alike && block.is_multiple_of(row_len) { (block / row_len) as usize } else { 1 }
}

/// The piece that has element `at` of all, and which of its own that is.
fn piece_at(pieces: &[Piece], mut at: u64) -> Option<(&Piece, u64)> {
    // A stack of experts has pieces of one length.
    let len = pieces.first()?.len;
    if pieces.iter().all(|p| p.len == len) {
        return Some((pieces.get((at / len) as usize)?, at % len));
    }
    for piece in pieces {
        if at < piece.len {
            return Some((piece, at));
        }
        at -= piece.len;
    }
    None
}

fn fill(
    checkpoint: &Checkpoint,
    pieces: &[Piece],
    mut first: u64,
    mut out: &mut [f32],
) -> Result<()> {
    while !out.is_empty() {
        let (piece, at) = piece_at(pieces, first).expect("rows of the tensor");
        let n = out.len().min((piece.len - at) as usize);
        let (now, rest) = out.split_at_mut(n);
        piece.walk.fill(at, now, |at, out| checkpoint.read(&piece.tensor, at, out))?;
        piece.maps.iter().for_each(|map| map.apply(now));
        first += n as u64;
        out = rest;
    }
    Ok(())
}

/// Whether all pieces are blocks of the type already.
fn is_kept(pieces: &[Piece], ty: TensorType, row_len: u64) -> bool {
    matches!(ty, TensorType::MXFP4 | TensorType::NVFP4 | TensorType::F8_E4M3)
        && pieces.iter().all(|piece| piece.runs_of(ty, row_len).is_some())
}

/// Small floats as they are, in as few reads as they lie in.
fn repack<'a>(
    checkpoint: &'a Checkpoint,
    pieces: &'a [Piece],
    ty: TensorType,
    row_len: u64,
) -> Make<'a> {
    let runs: Vec<Runs> = pieces.iter().filter_map(|piece| piece.runs_of(ty, row_len)).collect();
    let (len, block_len) = (run_len(ty, row_len), ty.block_len() as u64);
    let bytes = (len / block_len) as usize * ty.block_bytes();
    Box::new(move |first, mut out| {
        let mut run = first * row_len / len;
        let mut at = 0;
        for (piece, runs) in pieces.iter().zip(&runs) {
            let n_runs = piece.len / len;
            while run < at + n_runs && !out.is_empty() {
                let start = runs.start(run - at);
                let together = |n: &u64| runs.start(run - at + n) == start + n * len;
                let most = (out.len() / bytes) as u64;
                let most = most.min(at + n_runs - run);
                let n = (1..most).take_while(together).count() + 1;
                let (now, rest) = out.split_at_mut(n * bytes);
                checkpoint.read_blocks(&piece.tensor, ty, start / block_len, now)?;
                run += n as u64;
                out = rest;
            }
            at += n_runs;
        }
        Ok(0)
    })
}
