//! Indices of experts in a flat list: layer after layer, one cell for each expert.

use super::{Event, Expert, Phase, Shape};
use std::ops::Range;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    /// The first cell of each layer, and the number of all cells: [layers + 1].
    starts: Vec<usize>,
    /// Layers that have cells, in order.
    moe: Vec<u32>,
}

impl Grid {
    pub fn new(shape: &Shape) -> Grid {
        let mut starts = vec![0];
        starts.extend(shape.n_experts.iter().scan(0, |end, n| {
            *end += n;
            Some(*end)
        }));
        Grid { starts, moe: shape.moe_layers().map(|layer| layer as u32).collect() }
    }

    pub fn n_cells(&self) -> usize {
        self.starts[self.n_layers()]
    }

    /// Dense ones included.
    pub fn n_layers(&self) -> usize {
        self.starts.len() - 1
    }

    /// Cells of a layer; none where it is dense.
    pub fn row(&self, layer: u32) -> Range<usize> {
        self.starts[layer as usize]..self.starts[layer as usize + 1]
    }

    pub fn cell(&self, expert: Expert) -> usize {
        let row = self.row(expert.layer);
        assert!((expert.expert as usize) < row.len(), "{expert:?} is none of the model");
        row.start + expert.expert as usize
    }

    /// Whose cell that is.
    pub fn expert(&self, cell: usize) -> Expert {
        // Of layers that begin there the last has it: those before are dense.
        let layer = self.starts.partition_point(|start| *start <= cell) - 1;
        Expert { layer: layer as u32, expert: (cell - self.starts[layer]) as u32 }
    }

    pub fn moe(&self) -> &[u32] {
        &self.moe
    }

    /// How many MoE layers come before this one.
    pub fn place(&self, layer: u32) -> usize {
        self.moe.partition_point(|moe| *moe < layer)
    }

    /// The MoE layer that comes next, around the end to the next token's first one.
    pub fn after(&self, layer: u32) -> Option<u32> {
        let next = self.moe.partition_point(|moe| *moe <= layer);
        self.moe.get(next).or(self.moe.first()).copied()
    }

    /// The MoE layer that a decode step comes to next, after this event; `layer` before it.
    pub fn next(&self, event: &Event<'_>, layer: Option<u32>) -> Option<u32> {
        match event {
            Event::IterationStart { phase: Phase::Decode, .. } => self.moe.first().copied(),
            Event::Routed(routed) => self.after(routed.layer),
            _ => layer,
        }
    }

    /// How a section of the profile says of what model it is, little-endian: layers (u32), then
    /// experts of each (u32).
    pub fn header(&self) -> Vec<u8> {
        let n_experts = self.starts.windows(2).map(|ends| ends[1] - ends[0]);
        let fields = std::iter::once(self.n_layers()).chain(n_experts);
        fields.flat_map(|field| (field as u32).to_le_bytes()).collect()
    }

    /// Checks that the header is this model's and returns the bytes after it.
    pub fn strip_header<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], String> {
        let rest = bytes.strip_prefix(&self.header()[..]);
        rest.ok_or_else(|| "it was learned from a model of another shape".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn cells_are_in_order(n_experts in prop::collection::vec(0usize..5, 1..8)) {
            let grid = Grid::new(&Shape::of_model(n_experts.clone(), 1));
            let mut cell = 0;
            for (layer, n) in n_experts.iter().enumerate() {
                let layer = layer as u32;
                prop_assert_eq!(grid.row(layer), cell..cell + n);
                for expert in 0..*n as u32 {
                    prop_assert_eq!(grid.cell(Expert { layer, expert }), cell);
                    prop_assert_eq!(grid.expert(cell), Expert { layer, expert });
                    cell += 1;
                }
                let moe = |layer: &u32| n_experts[*layer as usize] > 0;
                prop_assert_eq!(grid.place(layer), (0..layer).filter(moe).count());
                let around = (layer + 1..n_experts.len() as u32).chain(0..=layer);
                prop_assert_eq!(grid.after(layer), around.into_iter().find(moe));
            }
            prop_assert_eq!(grid.n_cells(), cell);
        }

        #[test]
        fn headers_tell_models_apart(
            a in prop::collection::vec(0usize..3, 0..4),
            b in prop::collection::vec(0usize..3, 0..4),
            body in any::<Vec<u8>>(),
        ) {
            let grid = |n_experts: &Vec<usize>| Grid::new(&Shape::of_model(n_experts.clone(), 1));
            let bytes = [grid(&a).header(), body.clone()].concat();
            prop_assert_eq!(grid(&a).strip_header(&bytes).unwrap(), &body[..]);
            prop_assert_eq!(grid(&b).strip_header(&bytes).is_ok(), a == b);
        }
    }
}
