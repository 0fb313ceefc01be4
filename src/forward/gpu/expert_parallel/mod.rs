//! Expert parallelism: peers are devices beside the first that hold and compute experts only. The
//! first device runs the layer loop. It sends a router's input and choice to the peers that hold
//! chosen experts. They return a sum for each pair, and the first device adds these up in the same
//! order as on one device.

pub mod peer;
pub mod share;
mod staged_copy;
mod table_upload;
pub mod workspace;
