//! The place of weights. The structures of a layer's weights are generic over their residence: the
//! CPU and a device share them.

use super::recurrent::ConvWeights;
use super::{AttentionWeights, HeadMatrices, Linear, Matrix};
use std::fmt::Debug;

/// The types of weights in one place. A device groups the matrices of attention that read one
/// input, so that attention is a type of its own there.
pub trait Residence: Clone + Debug {
    type Matrix: Clone + Debug;
    type Linear: Clone + Debug;
    type Heads: Clone + Debug;
    /// f32s
    type Vector: Clone + Debug;
    /// u32s
    type Ids: Clone + Debug;
    type Conv: Clone + Debug;
    type Attention: Clone + Debug;
}

/// Matrices in the mapped file, vectors in memory.
#[derive(Clone, Debug)]
pub struct Host;

impl Residence for Host {
    type Matrix = Matrix;
    type Linear = Linear;
    type Heads = HeadMatrices;
    type Vector = Vec<f32>;
    type Ids = Vec<u32>;
    type Conv = ConvWeights;
    type Attention = AttentionWeights;
}
