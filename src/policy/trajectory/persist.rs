//! The section "trajectory" of the profile. Layout, little-endian: version (u32), the model's
//! header (`Grid::header`), rank (u32), tokens learned from (u64); then f32: the mean summary
//! [rank], the inverse of the second moments [rank, rank], and for each expert, layer after layer,
//! its part of a summary [rank] and its probability by the summary [rank].

use super::gain::Gain;
use super::map::{Map, Weights};
use super::vector::{RANK, Vector};
use crate::policy::grid::Grid;

const VERSION: u32 = 1;

/// Values beyond it are damage: summaries are sums of some hundred parts of about 1.
const LARGEST: f32 = 1e6;

impl Map {
    pub fn encode(&self, grid: &Grid) -> Vec<u8> {
        let Map { weights, gain, mean, n_tokens } = self;
        let mut out = VERSION.to_le_bytes().to_vec();
        out.extend(grid.header());
        out.extend((RANK as u32).to_le_bytes());
        out.extend(n_tokens.to_le_bytes());
        let weights = weights.iter().flat_map(|w| [&w.own, &w.next]);
        let vectors = std::iter::once(mean).chain(&gain.inverse).chain(weights);
        out.extend(vectors.flatten().flat_map(|value| value.to_le_bytes()));
        out
    }

    /// Returns the reason as a clause, for use after a colon.
    pub fn decode(grid: &Grid, bytes: &[u8]) -> Result<Map, String> {
        let short = "it ends too early";
        let (version, rest) = bytes.split_first_chunk().ok_or(short)?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(format!("it has version {version}; this moeba reads version {VERSION}"));
        }
        let (rank, rest) = grid.strip_header(rest)?.split_first_chunk().ok_or(short)?;
        if u32::from_le_bytes(*rank) as usize != RANK {
            return Err("it has another rank".into());
        }
        let (n_tokens, rest) = rest.split_first_chunk().ok_or(short)?;
        let vectors = vectors(rest)?;
        let n_vectors = 1 + RANK + 2 * grid.n_cells();
        if vectors.len() != n_vectors {
            return Err(format!("{} vectors are not the {n_vectors} of the model", vectors.len()));
        }
        let (inverse, weights) = vectors[1..].split_at(RANK);
        let inverse: [Vector; RANK] = inverse.try_into().expect("as many as were split off");
        if (0..RANK).any(|i| inverse[i][i] <= 0.0) {
            return Err("its second moments are not positive".into());
        }
        let pairs = weights.as_chunks::<2>().0.iter();
        let weights = pairs.map(|[own, next]| Weights { own: *own, next: *next }).collect();
        let n_tokens = u64::from_le_bytes(*n_tokens);
        Ok(Map { weights, gain: Gain { inverse }, mean: vectors[0], n_tokens })
    }
}

fn vectors(bytes: &[u8]) -> Result<Vec<Vector>, String> {
    let (values, rest) = bytes.as_chunks();
    let values: Vec<f32> = values.iter().map(|value| f32::from_le_bytes(*value)).collect();
    let (vectors, part) = values.as_chunks::<RANK>();
    if !rest.is_empty() || !part.is_empty() {
        return Err("its length is not that of whole vectors".into());
    }
    if !values.iter().all(|value| value.abs() <= LARGEST) {
        return Err("it has values that no token can teach".into());
    }
    Ok(vectors.to_vec())
}
