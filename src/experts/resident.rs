//! Experts computed in place on the mapped file: everything is resident, nothing moves.

use std::sync::Arc;

use super::{ExpertStore, Geometry, ReadyGranule, Work};
use crate::Result;
use crate::gguf::Gguf;

/// One of a layer's three expert tensors: equal matrices, one an expert, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Stack {
    /// Which of `Gguf::tensors`.
    pub tensor: usize,
    /// Rows of one expert's matrix.
    pub rows: usize,
    pub row_bytes: usize,
    /// Elements and bytes a block of the tensor's type.
    pub block_len: usize,
    pub block_bytes: usize,
}

/// The experts of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerExperts {
    pub n_experts: usize,
    pub geometry: Geometry,
    pub gate: Stack,
    pub up: Stack,
    pub down: Stack,
}

/// All experts of a model, in the mapped file.
pub struct Resident {
    file: Arc<Gguf>,
    layers: Vec<Option<LayerExperts>>,
}

impl Resident {
    /// Asserts that each stack's shape fits its tensor: the caller has checked the file.
    pub fn new(file: Arc<Gguf>, layers: Vec<Option<LayerExperts>>) -> Resident {
        for layer in layers.iter().flatten() {
            for stack in [layer.gate, layer.up, layer.down] {
                let n_bytes = file.tensors()[stack.tensor].n_bytes;
                let expected = layer.n_experts * stack.rows * stack.row_bytes;
                assert_eq!(n_bytes, expected as u64, "{}", file.tensors()[stack.tensor].name);
            }
            assert_eq!(layer.gate.rows, layer.geometry.n_ff);
            assert_eq!(layer.geometry.granule_rows % layer.down.block_len.min(layer.gate.rows), 0);
        }
        Resident { file, layers }
    }

    fn matrix(&self, stack: &Stack, expert: usize) -> &[u8] {
        let n_bytes = stack.rows * stack.row_bytes;
        &self.file.bytes(&self.file.tensors()[stack.tensor])[expert * n_bytes..][..n_bytes]
    }

    fn granule(&self, layer: &LayerExperts, expert: u32, index: usize) -> ReadyGranule<'_> {
        let rows = layer.geometry.rows(index);
        let of_rows = |stack: &Stack| {
            &self.matrix(stack, expert as usize)
                [rows.start * stack.row_bytes..rows.end * stack.row_bytes]
        };
        let block = |column: usize| column / layer.down.block_len * layer.down.block_bytes;
        let down = self.matrix(&layer.down, expert as usize);
        // The last row of a column range ends where its own columns end.
        let cut_off = layer.down.row_bytes - block(rows.end);
        ReadyGranule {
            expert,
            index: index as u32,
            rows: rows.clone(),
            gate: of_rows(&layer.gate),
            up: of_rows(&layer.up),
            down: &down[block(rows.start)..down.len() - cut_off],
            gate_stride: layer.gate.row_bytes,
            up_stride: layer.up.row_bytes,
            down_stride: layer.down.row_bytes,
        }
    }
}

impl ExpertStore for Resident {
    fn geometry(&self, layer: usize) -> Option<Geometry> {
        self.layers[layer].as_ref().map(|l| l.geometry)
    }

    fn acquire(&self, layer: usize, experts: &[u32], work: &mut Work) -> Result<()> {
        work.start(layer, experts);
        Ok(())
    }

    fn next_ready<'a>(&'a self, work: &mut Work, ready: &mut Vec<ReadyGranule<'a>>) -> Result<()> {
        ready.clear();
        let layer = self.layers[work.layer].as_ref().expect("a layer with experts");
        for &expert in &work.experts[work.handed_out..] {
            let granules = 0..layer.geometry.n_granules();
            ready.extend(granules.map(|index| self.granule(layer, expert, index)));
        }
        work.handed_out = work.experts.len();
        Ok(())
    }

    fn release(&self, work: &mut Work) {
        work.finish();
    }
}
