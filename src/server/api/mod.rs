//! Wire formats: a module each, which reads requests into the inner one and writes inner events.

pub mod anthropic;
pub mod chat;
mod chat_stream;
pub mod completions;
mod custom;
pub mod embeddings;
mod form;
mod logprobs;
mod messages;
pub mod models;
pub mod native;
pub mod ollama;
mod parts;
mod prompts;
pub mod rerank;
pub mod responses;
pub mod sampling;
pub mod structural_tag;
pub mod text;
mod usage;
