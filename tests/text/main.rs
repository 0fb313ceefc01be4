//! Text in and out: tokenizers, chat templates, samplers.

// Chat templates against transformers.
mod chat_templates;

// The sampler against exact probabilities, by the chi-square test.
mod sample_distribution;

// Stop strings across parts.
mod sample_stop;

// Tokenizers against the reference implementations.
mod tokenizer_reference;

// Special tokens, ends of generation, streaming, broken vocabularies.
mod tokenizer_vocab;
