//! The CPU backend: the specification of every operation.
