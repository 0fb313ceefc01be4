//! GGUF files and block formats.

// Reading all weights finds NaN and infinity in every floating-point field.
mod gguf_check;

// The fuzz corpus and mutations of it.
mod gguf_corpus;

// Tensors that outlive the mapped file.
mod gguf_detach;

// Reader and writer against gguf-rs.
mod gguf_oracle;

// The reader against fixtures of PyPI's `gguf`.
mod gguf_read;

// The writer: round trips, failures, signals.
mod gguf_write;

// Block formats against golden bytes of PyPI's `gguf`.
mod quant_formats;

// Grid formats (IQ1, IQ2, IQ3) against golden values of PyPI's `gguf`.
mod quant_grids;

// Matrix products: scalar and vector kernels give the same bits.
mod quant_kernels;

// Float operations: scalar and vector kernels give the same bits.
mod quant_ops;

// Quantisation error against ggml's quantisers.
mod quant_quality;
