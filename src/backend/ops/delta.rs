//! Gated delta rule (arXiv 2412.06464): sizes of a linear-attention layer.

use super::{ConvShape, StateSize};

/// Sizes of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub n_k_heads: usize,
    /// Heads of values: a multiple of `n_k_heads`.
    pub n_v_heads: usize,
    /// Elements of one head of q and k.
    pub k_dim: usize,
    /// Elements of one head of v.
    pub v_dim: usize,
    /// Width of the convolution in positions, the current one included.
    pub kernel: usize,
    pub order: HeadOrder,
}

/// The map from value heads to key heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// h / (n_v_heads / n_k_heads): the value heads of a key head are adjacent.
    Grouped,
    /// h mod n_k_heads
    Tiled,
}

impl DeltaShape {
    pub fn key_width(&self) -> usize {
        self.n_k_heads * self.k_dim
    }

    pub fn value_width(&self) -> usize {
        self.n_v_heads * self.v_dim
    }

    /// Channels of the convolution: q, k, v.
    pub fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    pub fn conv(&self) -> ConvShape {
        ConvShape { channels: self.channels(), kernel: self.kernel }
    }

    pub fn state_size(&self) -> StateSize {
        StateSize { n_past: self.n_past(), n_state: self.n_state() }
    }

    /// Values of the state: [n_v_heads, k_dim, v_dim].
    pub fn n_state(&self) -> usize {
        self.n_v_heads * self.k_dim * self.v_dim
    }

    /// Inputs that the convolution remembers: [kernel − 1, channels].
    pub fn n_past(&self) -> usize {
        self.conv().n_past()
    }

    /// The key head of a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.order {
            HeadOrder::Grouped => value_head / (self.n_v_heads / self.n_k_heads),
            HeadOrder::Tiled => value_head % self.n_k_heads,
        }
    }
}
