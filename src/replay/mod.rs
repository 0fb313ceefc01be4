//! Replay: what policies would have done on recorded routing, without a model. Like the policies
//! it drives, it knows no engine and reads no clock.

pub mod trace;
