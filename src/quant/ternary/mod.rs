//! Ternary formats: values −1, 0 and 1 with one scale per 256.

pub mod tq1_0;
pub mod tq2_0;
