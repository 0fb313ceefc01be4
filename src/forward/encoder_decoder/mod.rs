//! Encoder–decoder models: an encoder reads a whole source text at once, a decoder answers token by
//! token. Each of the decoder's layers attends to the answer so far and to the encoder's output.
//!
//! Both stacks are layers of one model. In every list of layers, and so for the expert store and
//! its policies, the encoder's come first: layer l of the decoder is `n_encoder_layers + l`. A text
//! is one request: one pass over the encoder's layers, then one over the decoder's for each step.
//!
//! # GGUF
//!
//! Keys and tensors are llama.cpp's of its encoder–decoder models, where it has such:
//!
//! | key (`{arch}.` before it) | value |
//! |---|---|
//! | `block_count` | layers of the encoder |
//! | `decoder_block_count` | layers of the decoder (as many if absent) |
//! | `decoder_start_token_id` | the token that the decoder starts with |
//! | `attention.relative_buckets_count` | rows of the tables of relative positions |
//! | `attention.relative_max_distance` | from which distance on the last of them counts (128) |
//! | `expert_count`, `expert_used_count` | as in decoders, of both stacks |
//! | `expert_capacity` | tokens of one pass that an expert takes (no limit if absent) |
//! | `expert_weights_norm`, `expert_weights_scale`, `embedding_scale` | as in decoders |
//!
//! Tensors are `enc.blk.{i}.*`, `enc.output_norm`, `dec.blk.{i}.*` and `dec.output_norm`; a
//! decoder's layer has `cross_attn_norm`, `cross_attn_q`, `_k`, `_v`, `_o` besides. A layer with
//! `ffn_gate_inp` has `ffn_up_exps` and `ffn_down_exps` [inputs, outputs, experts], and
//! `ffn_gate_exps` if its experts have a gate; each may have a `.bias` beside its `.weight`.
//!
//! # Exactness
//!
//! Bits do not depend on threads, budget, policy, or the place of an expert. They depend on what is
//! computed together in one way, by definition: where experts have a capacity, it counts the tokens
//! of one text in one pass, as transformers does at inference: in the encoder all of the text, in
//! the decoder those that are handed over at once. So the encoder reads a text in one pass,
//! whatever the micro-batch, and so does the decoder what one call gives it. A step of one token
//! never meets the limit. Other texts in the batch are not counted.

mod attention;
mod layer;
mod positions;

pub(crate) use layer::set_sources;
pub(super) use positions::add_sinusoids;

pub use crate::model::encoder::EncoderParams;
pub use crate::model::weights::encoder::EncoderWeights;
