//! Routing traces: the experts that a model chose for real text, and the inputs that a policy has
//! when it predicts them. A `.mtrace` file belongs to one model and holds requests, each a prompt
//! and the decode steps after it.
//!
//! For each token: its id, and for each MoE layer the chosen experts, best first, and the
//! probabilities of all experts, unless the header says that they are unknown. An id of
//! [`UNKNOWN_TOKEN`] is that of no token. The embedding of a token never changes, so each is stored
//! once. For decode steps also, if the header says so, the *hidden* state (what the router saw: the
//! normalised input of the experts) and, for distances 1 to `ahead`, what the routers of the MoE
//! layers that come next make of this layer's activation (MoEpic, Eq. 3). Distances count MoE
//! layers. Behind the last MoE layer comes the next token's first one, as far as distance 1 goes:
//! policies get the same there. Farther ones end with the token.
//!
//! # Layout
//!
//! Little-endian. Everything is covered by a CRC-32 (IEEE), so damage is noticed.
//!
//! | part | contents |
//! |---|---|
//! | magic | `MOEBATRC` |
//! | version | u32, 1 |
//! | header | u32 length, then [`Header`], see `header.rs` |
//! | | u32 CRC of all of the above |
//! | blocks | u32 compressed length > 0, u32 length, u32 CRC of these and the rest; raw DEFLATE |
//! | end | u32 0; u64 requests, u64 tokens, u64 distinct tokens; u32 CRC of these four |
//!
//! A block is a run of tokens of one request, see `block.rs`.
//!
//! Probabilities of a [`Precision::Compact`] trace are one byte q each, p = (q / 255)²: the square
//! root spreads the small ones, which are most. They are divided by their sum when they are read.
//! An embedding is an f32 scale and signed bytes, hidden states are f16. In [`Precision::Exact`]
//! traces all these are f32.

mod block;
mod bytes;
mod header;
mod layout;
mod quantise;
mod reader;
mod writer;

pub use header::{Header, LayerShape, MAX_AHEAD, Precision};
pub use reader::{Request, Trace};
pub use writer::Writer;

/// Stands for the id of a token that is not known.
pub const UNKNOWN_TOKEN: u32 = u32::MAX;

const MAGIC: &[u8; 8] = b"MOEBATRC";
const VERSION: u32 = 1;

#[cfg(test)]
mod tests;
