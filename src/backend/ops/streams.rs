//! Several residual streams a token.

/// Streams of a token, at most, that devices mix: a warp has their weights.
pub const DEVICE_STREAMS_MAX: usize = 8;

/// Streams, at most, of which devices take the mean: those that layers have left behind, and the
/// present one.
pub const DEVICE_SOURCES_MAX: usize = 64;

/// The form of a token's hyper-connection.
#[derive(Clone, Copy, Debug)]
pub struct Mixing<'a> {
    /// Streams of a token.
    pub n: usize,
    /// Factors on the mixes that make weights of inputs, of outputs and, if there are three, of
    /// streams among themselves.
    pub scales: &'a [f32],
    /// Added to the mixes: n, n and, if there are three scales, n · n.
    pub bases: &'a [f32],
    pub eps: f32,
    /// Factor on weights of outputs.
    pub magnitude: f32,
    /// Rounds of making the weights of streams doubly stochastic (Sinkhorn).
    pub rounds: usize,
}

impl Mixing<'_> {
    /// Mixes of a token.
    pub fn width(&self) -> usize {
        self.bases.len()
    }
}
