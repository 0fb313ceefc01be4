//! Where the arithmetic runs.

pub mod cpu;
pub mod cuda;
pub mod gpu;
pub mod ops;
pub mod selftest;
