//! Models on a GPU.

pub mod vram;
