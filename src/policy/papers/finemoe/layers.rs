//! The MoE layers of a model, counted from 0 without the dense layers between them: the paper's
//! 1…L, less one. Such a number is called an ordinal here.

use crate::policy::Shape;
use std::ops::Range;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MoeLayers {
    /// The model's number of each MoE layer, ascending.
    numbers: Vec<u32>,
    /// The first index of each layer in an array of all experts, and the array's length.
    starts: Vec<usize>,
}

impl MoeLayers {
    pub fn new(shape: &Shape) -> Self {
        let numbers: Vec<u32> = shape.moe_layers().map(|layer| layer as u32).collect();
        let mut starts = vec![0];
        for &layer in &numbers {
            let n_experts = shape.n_experts[layer as usize];
            assert!(n_experts <= 1 << 16, "expert ids are stored as u16");
            starts.push(starts[starts.len() - 1] + n_experts);
        }
        Self { numbers, starts }
    }

    /// L
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// `None` of a dense layer and of one that the model has not.
    pub fn ordinal(&self, layer: u32) -> Option<usize> {
        self.numbers.binary_search(&layer).ok()
    }

    pub fn number(&self, ordinal: usize) -> u32 {
        self.numbers[ordinal]
    }

    /// J
    pub fn n_experts(&self, ordinal: usize) -> usize {
        self.range(ordinal).len()
    }

    /// The layer's part of an array of all experts.
    pub fn range(&self, ordinal: usize) -> Range<usize> {
        self.starts[ordinal]..self.starts[ordinal + 1]
    }

    /// Experts of all layers.
    pub fn n_all_experts(&self) -> usize {
        self.starts[self.len()]
    }
}
