//! Small floats that stay what they are, where GGUF has their type: blocks of MXFP4, and NVFP4 and
//! F8_E4M3 with the factor that each matrix has besides.

use super::checkpoint::Checkpoint;
use super::encoding::Encoding;
use super::plan::{Piece, Planned, Source};
use super::view::Runs;
use crate::Result;
use crate::gguf::TensorType;
use crate::model::descriptor::Descriptor;

/// Elements of a type that have to lie together: a block, or a row where there are none.
pub fn run_len(ty: TensorType, row_len: u64) -> u64 {
    if ty.block_len() == 1 { row_len } else { ty.block_len() as u64 }
}

impl Piece {
    fn kept_type(&self) -> Option<TensorType> {
        self.tensor.encoding.as_ref()?.kept_type()
    }

    /// The starts of its blocks of a type, or of its rows, if it consists of such.
    pub fn runs_of(&self, ty: TensorType, row_len: u64) -> Option<Runs> {
        let runs = self.walk.runs(run_len(ty, row_len));
        let runs = runs.filter(|runs| runs.is_aligned(ty.block_len() as u64));
        runs.filter(|_| self.kept_type() == Some(ty) && self.maps.is_empty())
    }

    /// The factor of each matrix, or one for all, of a piece that is kept.
    fn factors(&self, checkpoint: &Checkpoint) -> Result<Vec<f32>> {
        let factors = match &self.tensor.encoding {
            Some(Encoding::Scaled(scaled)) => checkpoint.matrix_factors(scaled)?,
            _ => Vec::new(),
        };
        Ok(if factors.is_empty() { vec![1.0] } else { factors })
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
    pub fn kept(&self, checkpoint: &Checkpoint, descriptor: &Descriptor) -> Result<Option<Kept>> {
        let Source::Pieces(pieces) = &self.source else { return Ok(None) };
        let Some(ty) = pieces.first().and_then(Piece::kept_type) else { return Ok(None) };
        let all = pieces.iter().all(|piece| piece.runs_of(ty, self.dims[0]).is_some());
        if !all || !super::mix::is_matrix(&self.name, &self.dims) {
            return Ok(None);
        }
        let of_pieces = pieces.iter().map(|piece| piece.factors(checkpoint));
        let of_pieces = of_pieces.collect::<Result<Vec<_>>>()?;
        let matrices = self.dims.iter().skip(2).product::<u64>() as usize;
        Ok(factors(&of_pieces, matrices).and_then(|of| self.with_factors(ty, of, descriptor)))
    }

    /// `kept`, once the factors of the matrices are known.
    fn with_factors(
        &self,
        ty: TensorType,
        factors: Vec<f32>,
        descriptor: &Descriptor,
    ) -> Option<Kept> {
        if factors.iter().all(|x| *x == 1.0) {
            return Some(Kept { ty, factors: None });
        }
        // No reader takes others.
        if factors.iter().any(|x| *x == 0.0 || !x.is_finite()) {
            return None;
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

/// The factor of each matrix of a tensor, of those of its pieces; `None` if parts of a matrix have
/// several.
fn factors(all: &[Vec<f32>], matrices: usize) -> Option<Vec<f32>> {
    let is_one = |factors: &Vec<f32>| factors.len() == 1;
    match all {
        // Every matrix is a piece.
        _ if all.len() == matrices && all.iter().all(is_one) => Some(all.concat()),
        [factors] if factors.len() == matrices => Some(factors.clone()),
        [first, rest @ ..] if is_one(first) && rest.iter().all(|of| of == first) => {
            Some(vec![first[0]; matrices])
        }
        _ => None,
    }
}
