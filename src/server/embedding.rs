//! Embeddings of a request's texts: as many at a time as there are sessions, so that a request of
//! many texts takes no more of the queue than others.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::sleep;

use super::collect::each;
use super::errors::{ApiError, ApiResult, Kind};
use super::events::Event;
use super::models::Lease;
use super::request::{Prompt, Scheduling};
use super::router::Call;
use super::service::{PendingAnswer, Service};
use crate::engine::{Embedding, Pooling};

/// Texts to embed.
pub struct Texts {
    /// Token ids of each, which are in range and fit the context.
    pub tokens: Vec<Vec<u32>>,
    pub pooling: Pooling,
    pub scheduling: Scheduling,
}

impl Texts {
    /// Tokens of all texts.
    pub fn n_tokens(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }

    /// The embedding of each text. `running` is the request.
    pub async fn embed(&self, service: &Arc<Lease>, call: &mut Call) -> ApiResult<Vec<Embedding>> {
        let Some(report) = &mut call.report else {
            return Err(ApiError::server("the request was answered before"));
        };
        let running = Arc::new(call.client.enter()?);
        let mut embeddings = Vec::with_capacity(self.tokens.len());
        for part in self.tokens.chunks(service.scheduler.options().n_parallel.max(1)) {
            let submit = || -> ApiResult<PendingAnswer> {
                let prepare =
                    |ids: &Vec<u32>| service.prepare_embedding(ids, self.pooling, &self.scheduling);
                let prepared = part.iter().map(prepare).collect::<ApiResult<Vec<_>>>()?;
                service.submit_as(prepared, &call.client, &running)
            };
            let answer = loop {
                match submit() {
                    // The request was taken: what is left of it waits for its turn.
                    Err(error) if error.kind == Kind::Overloaded && !embeddings.is_empty() => {
                        match error.retry_after_ms {
                            Some(ms) => sleep(Duration::from_millis(ms)).await,
                            None => return Err(error),
                        }
                    }
                    answer => break answer?,
                }
            };
            let mut of_part: Vec<Option<Embedding>> = vec![None; part.len()];
            let take = |i: usize, event| {
                if let Event::Embedded(embedding) = event {
                    of_part[i] = Some(embedding);
                }
            };
            each(answer, report, take).await?;
            let lost = || ApiError::server("a text was not embedded");
            let of_part: Option<Vec<Embedding>> = of_part.into_iter().collect();
            embeddings.extend(of_part.ok_or_else(lost)?);
        }
        Ok(embeddings)
    }
}

impl Service {
    /// How embeddings are pooled: to one row a text, if that `is_wanted`.
    pub fn pooling(&self, is_wanted: bool) -> ApiResult<Pooling> {
        let pooling = match self.defaults.pooling {
            Some(pooling) => pooling,
            None => self.engine().pooling().map_err(|e| ApiError::of_request(&e))?,
        };
        self.engine().check_embeds(pooling).map_err(|e| ApiError::not_supported(e.to_string()))?;
        let why = match pooling {
            Pooling::None if is_wanted => "outputs are not pooled (none): a text has no vector",
            Pooling::Rank => "outputs are pooled to scores (rank), of which /v1/rerank tells",
            _ => return Ok(pooling),
        };
        let cure = "start the server with --pooling mean or last";
        Err(ApiError::invalid("model", format!("model: its {why}; {cure}")))
    }

    /// The tokens of a text to embed, which is the field `path`. With `cuts` a text that does not
    /// fit the context ends early.
    pub fn text_tokens(&self, prompt: &Prompt, path: &str, cuts: bool) -> ApiResult<Vec<u32>> {
        let at = |error| ApiError { param: Some(path.to_owned()), ..error };
        let n_ctx = self.engine().n_ctx();
        let room = if cuts { usize::MAX } else { n_ctx };
        let mut tokens = self.encode(prompt, path, room).map_err(at)?.tokens;
        let Some(last) = tokens.last().copied() else {
            let message = format!("{path}: the text has no tokens: there is nothing to embed");
            return Err(ApiError::invalid(path, message));
        };
        if tokens.len() <= n_ctx {
            return Ok(tokens);
        }
        if !cuts {
            return Err(at(ApiError::context_overflow(tokens.len(), n_ctx)));
        }
        tokens.truncate(n_ctx);
        let tokenizer = self.engine().tokenizer();
        if tokenizer.add_eos() && tokenizer.eos() == Some(last) {
            tokens[n_ctx - 1] = last;
        }
        Ok(tokens)
    }

    /// The tokens of a query and a document to rank, which is the field `path`.
    pub fn rank_tokens(&self, query: &str, document: &str, path: &str) -> ApiResult<Vec<u32>> {
        let tokens = self.engine().rank_tokens(query, document);
        let tokens = tokens.map_err(|e| ApiError::of_request(&e))?;
        self.text_tokens(&Prompt::Tokens(tokens), path, false)
    }
}

/// The numbers of a row as JSON: the shortest that are read as these.
pub fn numbers(row: &[f32]) -> Value {
    row.iter().map(|x| Value::from(x.to_string().parse::<f64>().unwrap_or(f64::NAN))).collect()
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn numbers_are_short_and_exact() {
        let row = [0.1, -1.5e-8, f32::MAX, 3.0, 1.0 / 3.0];
        let json = numbers(&row);
        assert!(json.to_string().starts_with("[0.1,-1.5e-8,"), "{json}");
        let read: Vec<f32> = serde_json::from_value(json).unwrap();
        assert_eq!(read, row);
    }
}
