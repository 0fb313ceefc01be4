//! Embeddings: the outputs of a text's tokens, pooled to one vector, and the scores that a head of
//! the model makes of them.

use std::str::FromStr;

use super::{Engine, Session, Want};
use crate::{Error, Result};

/// How the outputs of a text's tokens become what is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The output of each token.
    None,
    /// The mean of all outputs.
    Mean,
    /// The first token's output.
    Cls,
    /// The last token's output.
    Last,
    /// The scores that the model's head makes of a query and a document.
    Rank,
}

impl Pooling {
    /// The names, for messages.
    pub const NAMES: &str = "none, mean, cls, last or rank";

    /// By the number that files have.
    fn of_number(number: u64) -> Option<Pooling> {
        const ALL: [Pooling; 5] =
            [Pooling::None, Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Rank];
        ALL.get(usize::try_from(number).ok()?).copied()
    }
}

impl FromStr for Pooling {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Pooling, String> {
        Ok(match text {
            "none" => Pooling::None,
            "mean" => Pooling::Mean,
            "cls" => Pooling::Cls,
            "last" => Pooling::Last,
            "rank" => Pooling::Rank,
            _ => return Err(format!("expected {}", Pooling::NAMES)),
        })
    }
}

/// A text's embedding: one row, or one for each token with [`Pooling::None`]. With
/// [`Pooling::Rank`] the row has a score for each of the head's labels.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// Numbers of a row.
    pub width: usize,
    /// [rows, width]
    pub values: Vec<f32>,
}

/// The Euclidean norm, as a number for [`Embedding::normalize`].
pub const EUCLIDEAN: i32 = 2;

impl Embedding {
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.width)
    }

    /// Divides each row by its norm: −1 is none, 0 the largest number's share of 32760, and p is
    /// the p-norm. A row of zeros stays.
    pub fn normalize(&mut self, norm: i32) {
        for row in self.values.chunks_exact_mut(self.width) {
            let sizes = row.iter().map(|x| f64::from(x.abs()));
            let size = match norm {
                ..0 => continue,
                0 => sizes.fold(0.0, f64::max) / 32760.0,
                EUCLIDEAN => sizes.map(|x| x * x).sum::<f64>().sqrt(),
                p => sizes.map(|x| x.powi(p)).sum::<f64>().powf(1.0 / f64::from(p)),
            };
            if size > 0.0 {
                row.iter_mut().for_each(|x| *x = (f64::from(*x) / size) as f32);
            }
        }
    }

    /// Keeps the first numbers of each row.
    pub fn shorten(&mut self, width: usize) {
        assert!((1..=self.width).contains(&width), "{width} of {} numbers", self.width);
        self.values = self.rows().flat_map(|row| &row[..width]).copied().collect();
        self.width = width;
    }
}

/// The outputs of a text so far.
pub(super) struct Pooled {
    pooling: Pooling,
    /// The outputs that are needed: of which tokens.
    kept: Pooling,
    n_embd: usize,
    /// Tokens whose outputs were seen.
    n: usize,
    /// Kept as they are, [rows, n_embd].
    rows: Vec<f32>,
    /// Sums of all outputs, by element, added in the order of the tokens.
    sums: Vec<f64>,
}

impl Pooled {
    fn new(pooling: Pooling, engine: &Engine) -> Pooled {
        let hyper = engine.model.hyper();
        let kept = match pooling {
            Pooling::Rank if hyper.sees_all => Pooling::Cls,
            Pooling::Rank => Pooling::Last,
            other => other,
        };
        Pooled { pooling, kept, n_embd: hyper.n_embd, n: 0, rows: Vec::new(), sums: Vec::new() }
    }

    /// The last of a pass's `n` tokens whose outputs are needed.
    pub fn n_wanted(&self, n: usize) -> usize {
        match self.kept {
            Pooling::Cls if self.n > 0 => 0,
            Pooling::Last => 1,
            _ => n,
        }
    }

    /// Takes the outputs of tokens from this position on. A pass that is computed again has the
    /// bits that it had.
    pub fn add(&mut self, position: usize, rows: &[f32]) {
        let end = position + rows.len() / self.n_embd;
        if end <= self.n {
            return;
        }
        match self.kept {
            Pooling::Last => self.rows = rows[rows.len() - self.n_embd..].to_vec(),
            Pooling::Cls if self.n > 0 => {}
            Pooling::Cls => self.rows = rows[..self.n_embd].to_vec(),
            Pooling::None | Pooling::Rank => {
                self.rows.extend_from_slice(&rows[(self.n - position) * self.n_embd..]);
            }
            Pooling::Mean => {
                self.sums.resize(self.n_embd, 0.0);
                for row in rows[(self.n - position) * self.n_embd..].chunks_exact(self.n_embd) {
                    self.sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
                }
            }
        }
        self.n = end;
    }

    fn finish(self, engine: &Engine) -> Embedding {
        let n = self.n as f64;
        let values = match self.pooling {
            Pooling::Mean => self.sums.iter().map(|sum| (sum / n) as f32).collect(),
            Pooling::Rank => engine.model.classify(&self.rows),
            Pooling::None | Pooling::Cls | Pooling::Last => self.rows,
        };
        let width = if self.pooling == Pooling::Rank { values.len() } else { self.n_embd };
        Embedding { width, values }
    }
}

impl Engine {
    /// The pooling that the file names. Without a name: the mean where tokens see the whole text,
    /// else the last token's output, which has seen all others.
    pub fn pooling(&self) -> Result<Pooling> {
        let key = self.model.descriptor.key("pooling_type");
        match self.gguf().u64(&key)? {
            None if self.model.hyper().sees_all => Ok(Pooling::Mean),
            None => Ok(Pooling::Last),
            Some(number) => Pooling::of_number(number).ok_or_else(|| {
                let expected = "a number from 0 to 4";
                Error::format(self.gguf().path(), key, expected, number.to_string())
            }),
        }
    }

    /// Fails if the model has no embeddings, or none of this pooling.
    pub fn check_embeds(&self, pooling: Pooling) -> Result<()> {
        if self.encoder().is_some() {
            let file = self.gguf().path().display();
            let why = format!("{file}: an encoder-decoder model has no embeddings");
            return Err(Error::invalid(why));
        }
        if pooling == Pooling::Rank { self.check_ranks() } else { Ok(()) }
    }
}

impl Session {
    /// The embedding of a text, which replaces the session's own. It is not normalised, and the
    /// output matrix is not computed.
    ///
    /// Fails as [`Session::eval`] does, if there are no tokens, and if the model has no such
    /// embedding.
    pub fn embed(&mut self, tokens: &[u32], pooling: Pooling) -> Result<Embedding> {
        let engine = self.engine.clone();
        engine.check_embeds(pooling)?;
        if tokens.is_empty() {
            return Err(Error::invalid("the text has no tokens: there is nothing to embed"));
        }
        self.begin_embedding(Some(pooling));
        let result = self.eval(tokens, Want::None).map(drop);
        let embedding = self.end_embedding();
        result?;
        embedding.ok_or_else(|| Error::invalid("the text was not embedded"))
    }

    /// Pools the outputs of the text that comes now, from its first token on, or no more.
    pub(super) fn begin_embedding(&mut self, pooling: Option<Pooling>) {
        if pooling.is_some() {
            self.truncate(0);
        }
        self.pooled = pooling.map(|pooling| Pooled::new(pooling, &self.engine));
    }

    /// The embedding of the text, if it is pooled.
    pub(super) fn end_embedding(&mut self) -> Option<Embedding> {
        self.pooled.take().map(|pooled| pooled.finish(&self.engine))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_norm_that_is_asked_for() {
        let of = |norm| {
            let mut embedding = Embedding { width: 2, values: vec![3.0, -4.0, 0.0, 0.0] };
            embedding.normalize(norm);
            embedding.values
        };
        assert_eq!(of(-1), [3.0, -4.0, 0.0, 0.0]);
        assert_eq!(of(0), [24570.0, -32760.0, 0.0, 0.0]);
        assert_eq!(of(1), [3.0 / 7.0, -4.0 / 7.0, 0.0, 0.0]);
        assert_eq!(of(2), [0.6, -0.8, 0.0, 0.0]);
        let cubes: f32 = of(3).iter().map(|x| x.abs().powi(3)).sum();
        assert!((cubes - 1.0).abs() < 1e-6, "{cubes}");
    }

    #[test]
    fn a_shorter_row_is_the_beginning_of_the_whole() {
        let mut embedding = Embedding { width: 3, values: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0] };
        embedding.shorten(2);
        assert_eq!(embedding, Embedding { width: 2, values: vec![1.0, 2.0, 4.0, 5.0] });
    }

    fn pooled(kept: Pooling) -> Pooled {
        Pooled { pooling: kept, kept, n_embd: 1, n: 0, rows: Vec::new(), sums: Vec::new() }
    }

    /// Each pass in turn, and one of them twice.
    #[test]
    fn passes_are_pooled_once() {
        let passes: [(usize, &[f32]); 4] =
            [(0, &[1.0, 2.0]), (2, &[4.0]), (2, &[4.0]), (3, &[8.0, 9.0])];
        let of = |kept| {
            let mut pooled = pooled(kept);
            for (position, rows) in passes {
                let n = pooled.n_wanted(rows.len());
                if n > 0 {
                    let position = position + rows.len() - n;
                    pooled.add(position, &rows[rows.len() - n..]);
                }
            }
            pooled
        };
        assert_eq!(of(Pooling::None).rows, [1.0, 2.0, 4.0, 8.0, 9.0]);
        assert_eq!(of(Pooling::Cls).rows, [1.0]);
        assert_eq!(of(Pooling::Last).rows, [9.0]);
        let mean = of(Pooling::Mean);
        assert_eq!((mean.sums[0], mean.n), (24.0, 5));
    }

    #[test]
    fn names_and_numbers_are_those_of_llama_cpp() {
        for (number, name) in ["none", "mean", "cls", "last", "rank"].iter().enumerate() {
            assert_eq!(Pooling::of_number(number as u64), name.parse().ok(), "{name}");
        }
        assert_eq!(Pooling::of_number(5), None);
        assert!("max".parse::<Pooling>().is_err());
    }
}
