//! Whole models: golden checkpoints, files that cannot run, the demo.

// LoRA adapters, merged and beside their model.
mod adapters;

// Sound GGUF files that are no model that can run; requests that a model cannot serve.
mod bad_input;

// Every key and tensor of every architecture, dropped and damaged one at a time.
mod bad_input_sweep;

// Rows of several texts in one batch.
mod batches;

// Random models of architectures without a checkpoint, against llama.cpp.
mod cards;

// Texts of models with a recurrent state.
mod checkpoints;

// The demo model with the commands of the README.
mod demo;

// Masked tokens filled in, against the published loops.
mod diffusion;

// Vectors of texts, and scores of documents.
mod embeddings;

// Encoder–decoder checkpoints against transformers.
mod golden_encoder_decoder;

// Text generation step by step: grammars and log probabilities.
mod generation;

// Decoder checkpoints against transformers.
mod golden_logits;

// Texts on disk.
mod kv_disk;

// Layouts that our converter does not write.
mod old_layouts;

// The layer that predicts the token after the next.
mod next_token;

// Texts that share memory.
mod parking;

// Factors beside matrices.
mod scales;

// Many texts at a time with the scheduler.
mod scheduler;

// Drafts change no bit of a text.
mod speculation;

// Keys that nothing reads.
mod unread;
