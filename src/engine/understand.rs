//! A file becomes a model: what `run` does before it takes memory, and all that `inspect --check`
//! does before it reads the weights.

use crate::gguf::Gguf;
use crate::model::Bound;
use crate::tokenizer::{Tokenizer, Vocab};
use crate::{Error, Result};

/// Checks everything that a file says but the weights' values: metadata, shapes, vocabulary.
pub fn understand(gguf: Gguf, without_text: bool) -> Result<(Bound, Tokenizer)> {
    let has_text = !without_text || Vocab::is_in(&gguf)?;
    let tokenizer = has_text.then(|| Tokenizer::from_gguf(&gguf)).transpose()?;
    let bound = Bound::new(gguf)?;
    let n_vocab = bound.n_vocab();
    let tokenizer = tokenizer.unwrap_or_else(|| Tokenizer::without_text(n_vocab));
    if tokenizer.n_vocab() > n_vocab {
        return Err(Error::format(
            bound.gguf().path(),
            "tokenizer.ggml.tokens",
            format!("at most the {n_vocab} rows of the output tensor"),
            format!("{} tokens", tokenizer.n_vocab()),
        ));
    }
    Ok((bound, tokenizer))
}
