//! The section "infinity.eamc" of the profile: the collection outlives the run (5.3). Layout,
//! little-endian: the model's header (`Grid::header`), number of requests (u32); for each its
//! prefill EAM and its decode EAM, a u16 an expert, layer after layer.

use super::past::Past;
use crate::policy::grid::Grid;

pub const SECTION: &str = "infinity.eamc";

const COUNT_BYTES: usize = size_of::<u16>();

impl Past {
    pub fn encode(&self, grid: &Grid) -> Vec<u8> {
        let mut out = grid.header();
        out.extend((self.decode.len() as u32).to_le_bytes());
        for at in 0..self.decode.len() {
            let counts = self.prefill.matrix(at).iter().chain(self.decode.matrix(at));
            out.extend(counts.flat_map(|count| count.to_le_bytes()));
        }
        out
    }

    /// Keeps the last requests if there are more than the capacity. Returns the reason as a clause,
    /// for use after a colon.
    pub fn decode(grid: &Grid, capacity: usize, bytes: &[u8]) -> Result<Past, String> {
        let (n, counts) =
            grid.strip_header(bytes)?.split_first_chunk().ok_or("it ends too early")?;
        let n = u32::from_le_bytes(*n) as usize;
        let matrix_bytes = grid.n_cells() * COUNT_BYTES;
        if Some(counts.len()) != (2 * matrix_bytes).checked_mul(n) {
            return Err(format!("{} bytes are not the EAMs of {n} requests", counts.len()));
        }
        let mut past = Past::new(grid, capacity);
        if matrix_bytes == 0 {
            return Ok(past);
        }
        let requests = counts.chunks_exact(2 * matrix_bytes).skip(n.saturating_sub(capacity));
        for (at, request) in requests.enumerate() {
            let (prefill, decode) = request.split_at(matrix_bytes);
            past.prefill.put_counts(at, &unpack(prefill));
            past.decode.put_counts(at, &unpack(decode));
        }
        Ok(past)
    }
}

fn unpack(bytes: &[u8]) -> Vec<u16> {
    let counts = bytes.chunks_exact(COUNT_BYTES);
    counts.map(|count| u16::from_le_bytes([count[0], count[1]])).collect()
}
