//! The first formats: blocks of 32 with one scale, some with a minimum.

mod plain;
pub mod q4_0;
pub mod q4_1;
pub mod q5_0;
pub mod q5_1;
pub mod q8_0;
pub mod q8_1;
