//! Granules, residency, acquire and release: knows ids and bytes only.
