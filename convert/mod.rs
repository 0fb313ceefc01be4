//! Hugging Face checkpoint → GGUF.
