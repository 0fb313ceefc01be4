//! Recurrent layers: sizes of what carries on from position to position.

/// Elements of a key, at most, whose states devices compute: 32 columns of one and what is staged
/// beside them fit the shared memory of every device, 64 KiB.
pub const DEVICE_KEY_MAX: usize = 256;

/// States a channel, at most, that devices compute: those of 64 channels and their decays fit
/// there.
pub const DEVICE_STATES_MAX: usize = 64;

/// Values that a layer keeps of a text, whatever its length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateSize {
    /// Inputs that a convolution remembers.
    pub n_past: usize,
    pub n_state: usize,
}

/// A depthwise causal convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    pub channels: usize,
    /// Width in positions, the current one included.
    pub kernel: usize,
}

impl ConvShape {
    /// Inputs that it remembers: [kernel − 1, channels].
    pub fn n_past(self) -> usize {
        (self.kernel - 1) * self.channels
    }
}

/// A convolution's weights.
#[derive(Clone, Copy, Debug)]
pub struct ShortConv<'a> {
    pub shape: ConvShape,
    /// [channels, kernel], whose last column meets the present.
    pub weight: &'a [f32],
    /// `[channels]`
    pub bias: Option<&'a [f32]>,
    /// The result z becomes z·sigmoid(z).
    pub silu: bool,
}

/// A scan: S ← decay·S + k ⊗ v, out = Sᵀq, with a state a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanShape {
    pub n_heads: usize,
    /// Heads of queries and keys, each of which adjacent heads share: a divisor of `n_heads`.
    pub n_groups: usize,
    pub k_dim: usize,
    pub v_dim: usize,
}

impl ScanShape {
    /// Values of the state: [n_heads, k_dim, v_dim].
    pub fn n_state(self) -> usize {
        self.n_heads * self.k_dim * self.v_dim
    }

    /// Elements of a token's output.
    pub fn width(self) -> usize {
        self.n_heads * self.v_dim
    }
}

/// The heads of a vector in a token's row, which begin at `first + head · step`.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    pub first: usize,
    pub step: usize,
}

impl Columns {
    pub fn head<T>(self, row: &[T], head: usize, dim: usize) -> &[T] {
        &row[self.first + head * self.step..][..dim]
    }
}

/// A scan's inputs besides its state.
#[derive(Clone, Copy, Debug)]
pub struct Scan<'a> {
    pub shape: ScanShape,
    /// Rows of `width` elements, which have queries, keys and values in these columns.
    pub rows: &'a [f32],
    pub width: usize,
    pub q: Columns,
    pub k: Columns,
    pub v: Columns,
    /// A step a token and head, [tokens, n_heads]: values are multiplied by it. 1 without it.
    pub steps: Option<&'a [f32]>,
    /// The logarithm of a head's decay, for a step of 1: `[n_heads]`.
    pub log_decay: &'a [f32],
    /// Factor on a head's values, which are added to its output: `[n_heads]`.
    pub skip: Option<&'a [f32]>,
}
