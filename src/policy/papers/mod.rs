//! The policies of four papers, one folder each.

pub mod finemoe;
pub mod moe_infinity;
pub mod moepic;
pub mod prescope;

use super::registry::Names;

pub(super) const NAMES: [&Names; 4] =
    [&moe_infinity::NAMES, &finemoe::NAMES, &moepic::NAMES, &prescope::NAMES];
