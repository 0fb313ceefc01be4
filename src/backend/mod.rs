//! Where the arithmetic runs.

pub mod cpu;
pub mod gpu;
