//! The places of an expert's bytes, in the file and in slots, and the cut of a layer into granules.

pub mod geometry;
pub mod piece;
pub mod place;
pub mod sizing;
pub mod slots;
