//! The section "trajectory" of the profile. Layout, little-endian: version (u32), the model's
//! header (`Grid::header`), rank (u32), tokens learned from (u64), tokens of the vocabulary that
//! are known (u32), and for each its number and how often it came (u32 each); then f32: the mean
//! summary [rank], the inverses of the second moments for a token [rank, rank], for the next one
//! and for those to come [2·rank, 2·rank each], for each expert, layer after layer, its part of a
//! summary [rank], its probability for the next token and its rate by their inputs [2·rank each],
//! and the mean summary of each known token [rank].

use super::map::{Map, Weights};
use super::tokens::{Row, Tokens};
use super::vector::{Input, RANK, Vector, WIDTH, joined};
use crate::policy::grid::Grid;

const VERSION: u32 = 2;

/// Values beyond it are damage: summaries are sums of some hundred parts of about 1.
const LARGEST: f32 = 1e6;

impl Map {
    pub fn encode(&self, grid: &Grid) -> Vec<u8> {
        let Map { weights, own, next, later, mean, n_tokens, tokens } = self;
        let mut out = VERSION.to_le_bytes().to_vec();
        out.extend(grid.header());
        out.extend((RANK as u32).to_le_bytes());
        out.extend(n_tokens.to_le_bytes());
        out.extend((tokens.known().count() as u32).to_le_bytes());
        out.extend(tokens.known().flat_map(|row| [row.token, row.n]).flat_map(u32::to_le_bytes));
        let mut put = |values: &[f32]| out.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        put(mean);
        put(own.inverse.as_flattened());
        put(next.inverse.as_flattened());
        put(later.inverse.as_flattened());
        for Weights { own, next, later } in weights {
            put(own);
            put(next);
            put(later);
        }
        tokens.known().for_each(|row| put(&row.mean));
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
        let (n_rows, rest) = rest.split_first_chunk().ok_or(short)?;
        let n_rows = u32::from_le_bytes(*n_rows) as usize;
        let heads = n_rows.checked_mul(8).and_then(|n| rest.split_at_checked(n));
        let (heads, rest) = heads.ok_or(short)?;
        let vectors = vectors(rest)?;
        let n_vectors = 1 + RANK + 4 * WIDTH + 5 * grid.n_cells() + n_rows;
        if vectors.len() != n_vectors {
            return Err(format!("{} vectors are not the {n_vectors} of the model", vectors.len()));
        }
        let (mean, rest) = vectors.split_at(1);
        let (own, rest) = rest.split_at(RANK);
        let (next, rest) = rest.split_at(2 * WIDTH);
        let (later, rest) = rest.split_at(2 * WIDTH);
        let (weights, means) = rest.split_at(5 * grid.n_cells());
        let weights = weights.as_chunks::<5>().0.iter().map(|[own, a, b, c, d]| Weights {
            own: *own,
            next: joined(a, b),
            later: joined(c, d),
        });
        let mut tokens = Tokens::new();
        for (head, mean) in heads.as_chunks::<8>().0.iter().zip(means) {
            let (token, n) = head.split_at(4);
            let [token, n] = [token, n].map(|x| u32::from_le_bytes(x.try_into().expect("four")));
            tokens.put(Row { token, n, mean: *mean });
        }
        let mut map = Map {
            weights: weights.collect(),
            mean: mean[0],
            n_tokens: u64::from_le_bytes(*n_tokens),
            tokens,
            ..Map::new(0)
        };
        map.own.restore(own.to_vec())?;
        map.next.restore(inputs(next))?;
        map.later.restore(inputs(later))?;
        Ok(map)
    }
}

fn inputs(vectors: &[Vector]) -> Vec<Input> {
    vectors.as_chunks::<2>().0.iter().map(|[first, second]| joined(first, second)).collect()
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
