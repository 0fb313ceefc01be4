//! Codes of one and two bits with one scale per 128 and 64 values. Activations have a scale for
//! each 32 of those, so in "One arithmetic" a run of 32 values, a *part*, is a block b of its own.
//! All the values are ones of Q4_0, which is how parts are written out: the same d, the same q.

pub mod q1_0;
pub mod q2_0;
