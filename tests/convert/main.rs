//! Conversion and quantisation of checkpoints.

// Damaged checkpoints: one sentence with file and field, no file left behind.
mod bad_input;

// Exit codes and messages of the commands.
mod cli;

// Converted golden checkpoints against llama.cpp's converter, tensor by tensor.
mod golden;

// Importance matrices in both formats.
mod imatrix;

// Checkpoints that lack a tensor or a field.
mod missing;

// Configs with a field changed against transformers.
mod perturbed;

// A full disk, Ctrl-C and the memory that a conversion takes, each in a child process.
mod process;

// Checkpoints that other libraries quantised, weight by weight.
mod quantised;

// Models in several files, and types of single tensors.
mod shards;

// Files with random weights: every preset is understood, and routers choose as they are told to.
mod synth;

// The type of each tensor against llama-quantize's choice.
mod types;
