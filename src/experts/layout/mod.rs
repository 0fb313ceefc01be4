//! Where an expert's bytes are: in the file, in a slot, and how a layer is cut into granules.

pub mod geometry;
pub mod piece;
pub mod place;
pub mod sizing;
pub mod slots;
