//! The GPU path, on the emulated device.

// Attention and KV cache against the CPU.
mod attention;

// The gated delta rule against the CPU.
mod delta;

// The emulated device itself: results, races, uninitialised reads.
mod emulated;

// Encoder–decoder models.
mod encoder_decoder;

// Expert granules against the CPU.
mod experts;

// A matrix per head against the CPU.
mod heads;

// Quantised products against the CPU.
mod kernels;

// Models of every architecture: layer loop, KV cache, VRAM tier, CPU and GPU together.
mod models;

// The small operations between products against the CPU.
mod ops;

// Expert parallelism over several devices.
mod peers;

// The PTX in the tree is that of the kernels in the tree.
mod ptx;

// Norms, rotary positions, activations and routing against the CPU.
mod rows;

// The best logits, chosen on the device, against a sort on the CPU.
mod sample;

// Generations from logits that the device chose.
mod sampling;

// A device and a stream for kernel tests.
mod support;

// Streams that wait for values in memory.
mod waits;
