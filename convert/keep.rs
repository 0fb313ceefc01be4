//! Blocks of 4-bit floats that stay what they are, where GGUF has the type of block: MXFP4, and
//! NVFP4 with the factor that each matrix has besides.

use super::encoding::{Encoding, Scaled};
use super::plan::{Piece, Planned, Source};
use super::view::Runs;
use crate::gguf::TensorType;
use crate::model::descriptor::Descriptor;

impl Piece {
    fn scaled(&self) -> Option<&Scaled> {
        match &self.tensor.encoding {
            Some(Encoding::Scaled(scaled)) => Some(scaled),
            _ => None,
        }
    }

    /// The starts of its blocks of a type, if it consists of such blocks.
    pub fn runs_of(&self, ty: TensorType) -> Option<Runs> {
        let n = ty.block_len() as u64;
        let runs = self.walk.runs(n).filter(|runs| runs.is_aligned(n));
        let is_kept = self.scaled().and_then(Scaled::kept_type) == Some(ty);
        runs.filter(|_| is_kept && self.maps.is_empty())
    }
}

/// How a tensor is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    pub ty: TensorType,
    /// The tensor of factors beside it: a name and one a matrix.
    pub factors: Option<(String, Vec<f32>)>,
}

impl Planned {
    /// The type whose blocks the tensor's values are, if the architecture has the tensor of factors
    /// that they need.
    pub fn kept(&self, descriptor: &Descriptor) -> Option<Kept> {
        let Source::Pieces(pieces) = &self.source else { return None };
        let ty = pieces.first()?.scaled()?.kept_type()?;
        let all = pieces.iter().all(|piece| piece.runs_of(ty).is_some());
        if !all || !super::mix::is_matrix(&self.name, &self.dims) {
            return None;
        }
        let matrices = self.dims.iter().skip(2).product::<u64>() as usize;
        let factors = factors(pieces, matrices)?;
        if factors.iter().all(|x| *x == 1.0) {
            return Some(Kept { ty, factors: None });
        }
        let name = format!("{}.scale", self.name.strip_suffix(".weight")?);
        let layer = super::mix::layer_of(&name).unwrap_or(0);
        let mut roles = descriptor.tensors.keys();
        let is_known = |role: &String| {
            descriptor.tensor_name(role, layer as usize).is_some_and(|(known, _)| known == name)
        };
        roles.any(is_known).then_some(Kept { ty, factors: Some((name, factors)) })
    }
}

/// The factor of each matrix of a tensor; `None` if parts of a matrix have several.
fn factors(pieces: &[Piece], matrices: usize) -> Option<Vec<f32>> {
    let of_piece = |piece: &Piece| {
        let factors = piece.scaled().map(|s| s.factors.matrix_factors()).unwrap_or_default();
        if factors.is_empty() { vec![1.0] } else { factors }
    };
    let all: Vec<Vec<f32>> = pieces.iter().map(of_piece).collect();
    let is_one = |factors: &Vec<f32>| factors.len() == 1;
    match &all[..] {
        // Every matrix is a piece.
        _ if pieces.len() == matrices && all.iter().all(is_one) => Some(all.concat()),
        [factors] if factors.len() == matrices => Some(factors.clone()),
        [first, rest @ ..] if is_one(first) && rest.iter().all(|of| of == first) => {
            Some(vec![first[0]; matrices])
        }
        _ => None,
    }
}
