//! Positions of a layer's values in a token's row of each column. Only MoE layers have values.

use super::Header;
use std::ops::Range;

/// A router's probabilities for an earlier activation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AheadPart {
    /// The layer that the router belongs to.
    pub target: usize,
    /// Elements of the row.
    pub range: Range<usize>,
}

/// One layer's parts of the rows, in elements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerPart {
    pub chosen: Range<usize>,
    pub probs: Range<usize>,
    pub hidden: Range<usize>,
    /// Parts of distances 1 and up.
    pub ahead: Vec<AheadPart>,
}

/// Elements of one token in each column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Widths {
    pub chosen: usize,
    pub probs: usize,
    pub hidden: usize,
    pub ahead: usize,
}

#[derive(Clone, Debug)]
pub struct Layout {
    pub layers: Vec<LayerPart>,
    pub row: Widths,
}

impl Layout {
    pub fn new(header: &Header) -> Layout {
        let moe: Vec<usize> = header.moe_layers().collect();
        let mut layers = vec![LayerPart::default(); header.layers.len()];
        let mut row = Widths::default();
        let n_experts = |layer: usize| header.layers[layer].n_experts;
        for (i, &layer) in moe.iter().enumerate() {
            let part = &mut layers[layer];
            part.chosen = grow(&mut row.chosen, header.k.min(n_experts(layer)));
            let n_probs = if header.ids_only { 0 } else { n_experts(layer) };
            part.probs = grow(&mut row.probs, n_probs);
            part.hidden = grow(&mut row.hidden, if header.hidden { header.n_embd } else { 0 });
            for distance in 1..=header.ahead {
                let Some(target) = target(&moe, i, distance) else { break };
                let range = grow(&mut row.ahead, n_experts(target));
                part.ahead.push(AheadPart { target, range });
            }
        }
        Layout { layers, row }
    }
}

/// The MoE layer that comes `distance` after the i-th one. Around the end only the next.
fn target(moe: &[usize], i: usize, distance: usize) -> Option<usize> {
    match moe.get(i + distance) {
        Some(layer) => Some(*layer),
        None if distance == 1 => Some(moe[0]),
        None => None,
    }
}

fn grow(width: &mut usize, n: usize) -> Range<usize> {
    *width += n;
    *width - n..*width
}
