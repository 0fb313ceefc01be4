//! The head of a model that ranks: it makes scores of the output of one token.

use super::{Binder, Linear};
use crate::Result;

pub struct Classifier {
    /// A layer before the scores, with tanh.
    pub dense: Option<Linear>,
    /// A row for each label.
    pub output: Option<Linear>,
}

impl Classifier {
    /// `None` if the file has neither part.
    pub(crate) fn bind(b: &Binder) -> Result<Option<Classifier>> {
        let n = b.hyper.n_embd;
        let dense = match b.find("cls", 0)? {
            Some(_) => Some(b.linear("cls", 0, n, n)?),
            None => None,
        };
        let output = match b.find("cls_output", 0)? {
            Some(index) => {
                let n_labels = b.tensor(index).dims.get(1).map_or(1, |n| *n as usize);
                Some(b.linear("cls_output", 0, n_labels, n)?)
            }
            None => None,
        };
        let is_there = dense.is_some() || output.is_some();
        Ok(is_there.then_some(Classifier { dense, output }))
    }
}
