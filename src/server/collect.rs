//! An answer as a whole.

use super::errors::ApiError;
use super::events::{Event, Finish, Token};
use super::report::Report;
use super::service::PendingAnswer;

/// One of an answer's choices.
#[derive(Debug, Default)]
pub struct Choice {
    pub reasoning: String,
    pub content: String,
    /// The tokens of the content, an end token not included.
    pub tokens: Vec<Token>,
    pub calls: Vec<Call>,
    pub finish: Option<Finish>,
}

/// A call of a tool.
#[derive(Debug, Default)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// JSON, unless the answer was cut.
    pub arguments: String,
}

impl Choice {
    fn add(&mut self, event: Event) {
        match event {
            Event::Reasoning(piece) => {
                self.reasoning.push_str(&piece.text);
            }
            Event::Content(piece) => {
                self.content.push_str(&piece.text);
                self.tokens.extend(piece.tokens);
            }
            Event::CallBegin { id, name, .. } => {
                self.calls.push(Call { id, name, arguments: String::new() });
            }
            Event::Arguments { index, text } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&text);
                }
            }
            Event::Finished(finish) => self.finish = Some(*finish),
            Event::Started { .. } | Event::Progress { .. } => {}
            Event::Embedded(_) | Event::Failed(_) => {}
        }
    }
}

/// Waits for all choices of an answer.
pub async fn collect(
    answer: PendingAnswer,
    n_choices: usize,
    report: &mut Report,
) -> Result<Vec<Choice>, ApiError> {
    report.request_hash = Some(answer.hash.clone());
    let mut choices: Vec<Choice> = (0..n_choices).map(|_| Choice::default()).collect();
    each(answer, report, |i, event| choices[i].add(event)).await?;
    Ok(choices)
}

/// Passes the events of an answer on, each with its choice, until all choices have ended.
pub async fn each(
    mut answer: PendingAnswer,
    report: &mut Report,
    mut take: impl FnMut(usize, Event),
) -> Result<(), ApiError> {
    while let Some((i, event)) = answer.next().await {
        report.see(&event);
        if let Event::Failed(error) = event {
            return Err(error);
        }
        if let Event::Finished(finish) = &event {
            report.finish(finish, &answer);
        }
        take(i, event);
    }
    Ok(())
}
