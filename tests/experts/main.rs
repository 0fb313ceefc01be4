//! Experts in RAM and VRAM: links, tiers, layouts, budgets.

// Memory budgets under limits of control groups.
mod budget;

// Free room is filled with what a profile knows.
mod filling;

// Granule-major files: the same bits as standard files, there and back.
mod layout;

// The disk links: extents, faults, slow and reordered reads, wake-ups.
mod link;

// The source and the faults of the link tests.
mod link_support;

// Slots that are spread over nodes of memory.
mod nodes;

// Streamed experts give the same bits as mapped ones.
mod streamed;

// The VRAM tier on the emulated device: its slots hold the bytes of the file.
mod vram;

// The file of the VRAM tier's tests.
mod vram_file;
