//! Engine (loaded, immutable) and Session (one timeline).
