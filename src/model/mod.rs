//! Descriptor, hyper-parameters, weight binding, KV cache, router, layer loop.

pub mod descriptor;
