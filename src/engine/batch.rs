//! One pass over tokens of several sessions.

use super::compute::{InnerPasses, Pass, Rest, Stack};
use super::observer::Listeners;
use super::{Engine, Session, Want};
use crate::cancel::Cancel;
use crate::forward;
use crate::policy::Phase;
use crate::{Error, Result};

/// A session's tokens in a batch.
pub struct BatchRow<'a> {
    pub session: &'a mut Session,
    /// At least one, to be appended to the session's text.
    pub tokens: &'a [u32],
    /// Whether the tokens are part of a prompt or a step of decode.
    pub phase: Phase,
    /// A step of decode of several tokens verifies drafts: all logits of each are computed if any
    /// are wanted.
    pub want: Want,
}

impl BatchRow<'_> {
    fn want_of_pass(&self) -> forward::Want {
        let verifies = self.phase == Phase::Decode && self.tokens.len() > 1;
        match self.want {
            Want::Last | Want::LastBest(_) if verifies => forward::Want::All,
            want => want.of_pass(),
        }
    }
}

/// Computes steps of decode while another batch rests.
pub struct Interlude<'a, 'b>(&'a mut InnerPasses<'b>);

impl Interlude<'_, '_> {
    /// [`Engine::eval_batch`] between two layers of another pass.
    pub fn eval_batch(&mut self, engine: &Engine, rows: &mut [BatchRow<'_>]) -> Result<()> {
        eval(engine, rows, &mut |pass| self.0.run(pass))
    }
}

impl Engine {
    /// Appends tokens to the texts of several sessions of this engine in one pass, which computes
    /// each expert once for all of them. Each text's logits, which [`Session::logits`] returns,
    /// have the bits that they have alone.
    ///
    /// Fails as [`Session::eval`] does, and if the batch has more than [`MemoryPlan::n_ubatch`]
    /// tokens. An error is that of all rows: none of them is kept. A row's cancelling ends the pass
    /// when all others are cancelled as well.
    ///
    /// [`MemoryPlan::n_ubatch`]: super::MemoryPlan::n_ubatch
    pub fn eval_batch(&self, rows: &mut [BatchRow<'_>]) -> Result<()> {
        eval(self, rows, &mut |pass| self.compute.run(&self.model, pass))
    }

    /// [`Engine::eval_batch`] that calls `between` before each layer and between the parts of it.
    /// If the pass `has_others` to rest for, parts are short, and steps of decode can be computed
    /// in between: on the CPU in each rest, on GPUs before layers. An error of `between` ends the
    /// pass.
    pub fn eval_batch_with(
        &self,
        rows: &mut [BatchRow<'_>],
        has_others: bool,
        between: &mut dyn FnMut(Rest, Option<Interlude<'_, '_>>) -> Result<()>,
    ) -> Result<()> {
        let mut between =
            |rest: Rest, inner: Option<&mut InnerPasses<'_>>| between(rest, inner.map(Interlude));
        eval(self, rows, &mut |pass| {
            self.compute.run_with_rests(&self.model, pass, has_others, &mut between)
        })
    }
}

/// Computes a batch with `run`.
fn eval(
    engine: &Engine,
    rows: &mut [BatchRow<'_>],
    run: &mut dyn FnMut(Pass<'_, '_>) -> Result<()>,
) -> Result<()> {
    check(engine, rows)?;
    let cancel = Cancel::all(rows.iter().map(|row| row.session.cancel.clone()));
    cancel.check()?;
    let (mut texts, mut listeners) = (Vec::new(), Vec::new());
    for row in rows.iter_mut() {
        let want = row.want_of_pass();
        let BatchRow { session, tokens, phase, .. } = row;
        session.start_request();
        let (text, listener) = session.parts(tokens, *phase, want);
        texts.push(text);
        listeners.push(listener);
    }
    let (texts, outputs) = (&mut texts[..], &mut Listeners(&mut listeners));
    let pass = Pass { stack: Stack::Decoder, texts, cancel, outputs, progress: None };
    let result = run(pass).and_then(|()| engine.check_files());
    rows.iter_mut().for_each(|row| row.session.end_pass(row.tokens, result.is_ok()));
    result
}

fn check(engine: &Engine, rows: &[BatchRow<'_>]) -> Result<()> {
    let (n, most) = (rows.iter().map(|row| row.tokens.len()).sum::<usize>(), engine.plan.n_ubatch);
    if rows.is_empty() || rows.iter().any(|row| row.tokens.is_empty()) {
        return Err(Error::invalid("every row of a batch needs a token"));
    }
    if n > most && engine.encoder().is_none() && !engine.model.hyper().sees_all {
        return Err(Error::invalid(format!("a batch has at most {most} tokens, got {n}")));
    }
    for BatchRow { session, tokens, .. } in rows {
        assert!(std::ptr::eq(&*session.engine, engine), "a session of another engine");
        if session.pooled.is_none() {
            engine.check_has_logits()?;
        }
        session.check_source()?;
        session.check_ids(tokens)?;
        session.check_room(session.n_past(), tokens.len())?;
    }
    Ok(())
}
