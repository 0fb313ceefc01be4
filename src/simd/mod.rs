//! Scalar, AVX2 (later AVX-512, NEON) versions of the hot loops; dispatched once, at start.
