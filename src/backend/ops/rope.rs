//! Rotary position embedding (RoFormer, section 3.4.2).

use serde::Deserialize;

/// Which elements of a head form a rotated pair; n = elements that rotate.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum RopePairing {
    /// (2i, 2i + 1): `norm` in llama.cpp
    #[default]
    Adjacent,
    /// (i, i + n/2): `neox` in llama.cpp
    Halves,
}

/// Which elements of a head rotate.
#[derive(Clone, Copy, Debug)]
pub struct RopeShape {
    /// Elements from one head to the next.
    pub head_dim: usize,
    /// Index in a head of the first element that rotates.
    pub offset: usize,
    pub pairing: RopePairing,
}

/// The angle of each pair per position, and a factor on cosines and sines.
#[derive(Clone, Debug)]
pub struct Frequencies {
    pairs: Vec<f32>,
    magnitude: f32,
}

impl Frequencies {
    pub fn new(pairs: Vec<f32>, magnitude: f32) -> Frequencies {
        Frequencies { pairs, magnitude }
    }

    /// Angle per position, by pair.
    pub fn pairs(&self) -> &[f32] {
        &self.pairs
    }

    /// Factor on cosines and sines.
    pub fn magnitude(&self) -> f32 {
        self.magnitude
    }
}
