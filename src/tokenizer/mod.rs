//! GGUF vocabularies to text and back.
