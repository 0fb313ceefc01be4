//! 4-bit floats (E2M1) with a shared scale per block: MXFP4, NVFP4.

pub mod e2m1;
pub mod mxfp4;
pub mod nvfp4;
