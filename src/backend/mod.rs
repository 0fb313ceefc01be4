//! Arithmetic: on the CPU, and on GPUs with CUDA.

pub mod cpu;
pub mod cuda;
pub mod gpu;
pub mod ops;
pub mod selftest;
