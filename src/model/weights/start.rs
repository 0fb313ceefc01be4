//! The norm of embeddings before the first layer, in a model that embeds texts.

use super::{Binder, Norm};
use crate::Result;
use crate::model::descriptor;

/// x = norm(x + kind)
pub struct StreamStart {
    /// Added to each token's embedding: that of the only kind of text.
    pub kind: Option<Vec<f32>>,
    pub norm: Norm,
}

impl StreamStart {
    /// `None` where the architecture has no such norm.
    pub(crate) fn bind(b: &Binder) -> Result<Option<StreamStart>> {
        let n = b.hyper.n_embd;
        if b.descriptor.parts.normed_embeddings {
            let (kind, eps) = (descriptor::Norm::Rms, b.hyper.norm_eps);
            let norm = Norm { kind, weight: vec![1.0; n], bias: Vec::new(), eps };
            return Ok(Some(StreamStart { kind: None, norm }));
        }
        if b.name("token_embd_norm", 0).is_none() {
            return Ok(None);
        }
        let kind = match b.find("token_types", 0)? {
            None => None,
            Some(index) => {
                let n_kinds = b.tensor(index).dims.get(1).map_or(1, |n| *n as usize);
                let mut kinds = b.values(index, &[n, n_kinds])?;
                kinds.truncate(n);
                Some(kinds)
            }
        };
        Ok(Some(StreamStart { kind, norm: b.norm("token_embd_norm", 0)? }))
    }
}
