//! The policies of four papers, one folder each.

pub mod finemoe;
pub mod moe_infinity;
pub mod moepic;
pub mod prescope;
