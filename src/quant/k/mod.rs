//! K-quants: super-blocks of 256 with quantised scales of sub-blocks.

mod affine;
pub mod q2_k;
pub mod q3_k;
pub mod q4_k;
pub mod q5_k;
pub mod q6_k;
pub mod q8_k;
pub mod scales;
mod symmetric;
