//! Adapters of low rank (LoRA, arXiv 2106.09685) beside matrices.

/// A pair of factors beside a stack of matrices: what W·x becomes is W·x + scale·B·(A·x).
#[derive(Clone, Debug)]
pub struct LowRank {
    /// Number of the adapter that it is of.
    pub adapter: usize,
    pub n_matrices: usize,
    pub rank: usize,
    pub n_inputs: usize,
    pub n_outputs: usize,
    /// [matrices, rank, inputs]
    pub a: Vec<f32>,
    /// [matrices, rank, outputs]: columns of B one behind the other.
    pub b: Vec<f32>,
    pub scale: f32,
}

/// The pairs beside one tensor, and how much of each adapter the rows of a batch take: a factor of
/// 0 leaves a row's bits as they are.
#[derive(Clone, Copy, Debug)]
pub struct Adapted<'a> {
    pub pairs: &'a [LowRank],
    /// [rows, adapters]
    pub factors: &'a [f32],
    pub n_adapters: usize,
}

/// Adapters of a layer's experts; a matrix without any has no pairs.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedExperts<'a> {
    pub gate: Adapted<'a>,
    pub up: Adapted<'a>,
    pub down: Adapted<'a>,
}

impl LowRank {
    /// Row `k` of a matrix's A.
    pub fn a(&self, matrix: usize, k: usize) -> &[f32] {
        &self.a[(matrix * self.rank + k) * self.n_inputs..][..self.n_inputs]
    }

    /// Column `k` of a matrix's B.
    pub fn b(&self, matrix: usize, k: usize) -> &[f32] {
        &self.b[(matrix * self.rank + k) * self.n_outputs..][..self.n_outputs]
    }
}

impl Adapted<'_> {
    /// Ranks of all pairs together.
    pub fn n_ranks(&self) -> usize {
        self.pairs.iter().map(|pair| pair.rank).sum()
    }

    /// The factor of a pair's products for a row.
    pub fn factor(&self, row: usize, pair: &LowRank) -> f32 {
        self.factors[row * self.n_adapters + pair.adapter] * pair.scale
    }
}
