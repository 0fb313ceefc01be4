//! Types of the operations: one definition each, for model descriptors, the CPU backend, the GPU
//! backend and the self-test that compares the two. Sizes, variants and operands only; a backend
//! computes.

mod attention;
mod delta;
mod expert;
mod low_rank;
mod recurrence;
mod rope;
mod routing;
mod rows;
mod streams;

pub use attention::DistanceBias;
pub use delta::{DeltaShape, HeadOrder};
pub use expert::{Activation, ExpertBiases, ExpertForm, ExpertScales, ExpertShape};
pub use low_rank::{Adapted, AdaptedExperts, LowRank};
pub use recurrence::{
    Columns, ConvShape, DEVICE_KEY_MAX, DEVICE_STATES_MAX, Scan, ScanShape, ShortConv, StateSize,
};
pub use rope::{Frequencies, RopePairing, RopeShape};
pub use routing::{Choice, Demand, NO_EXPERT, NO_PAIR, Route, RouteRows, Score, tiles};
pub use rows::{HeadMats, RowBytes, Rows, RowsMut, row_bytes};
pub use streams::{DEVICE_SOURCES_MAX, DEVICE_STREAMS_MAX, Mixing};

pub(in crate::backend) use routing::RouteScratch;
