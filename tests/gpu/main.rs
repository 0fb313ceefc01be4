//! The GPU path, on the emulated device.

// Attention and KV cache against the CPU.
mod attention;

// Batches of several sessions.
mod batches;

// Vectors of texts.
mod embeddings;

// The emulated device itself: results, races, uninitialised reads.
mod emulated;

// Encoder–decoder models.
mod encoder_decoder;

// Operations of a decoded token.
mod graphs;

// Prompts whose pairs the device groups by expert.
mod grouping;

// Missed experts that kernels read in the host's memory.
mod in_place;

// Single kernels, where the self-test does not reach.
mod kernels;

// Models of every architecture: layer loop, KV cache, VRAM tier, CPU and GPU together.
mod models;

// Texts that come back from pages, and checkpoints.
mod pages;

// Expert parallelism over several devices.
mod peers;

// The PTX in the tree is that of the kernels in the tree.
mod ptx;

// Hardware queues that streams share.
mod queues;

// Steps of decode between the layers of prompts.
mod rests;

// Generations from logits that the device chose.
mod sampling;

// Drafts: states that are taken back, and the layer that makes them.
mod speculation;

// A device and a stream for kernel tests.
mod support;

// Tokens that are one graph.
mod token_graph;

// Streams that wait for values in memory.
mod waits;
