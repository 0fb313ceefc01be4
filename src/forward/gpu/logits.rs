//! Logits of a pass whose output head is on the device.

use crate::Result;
use crate::backend::gpu::DeviceSlice;
use crate::backend::gpu::sample::{self, TOP_K_MAX};
use crate::forward::gpu::pass::GpuPass;
use crate::forward::gpu::upload::{floats, integers};
use crate::forward::logits::LOGITS_ROWS;
use crate::forward::{LogitRow, Logits, TopK};
use crate::simd::kernels;

impl<'a> GpuPass<'a> {
    /// x → normalised outputs of the rows that are wanted
    pub fn outputs(&mut self) -> Result<()> {
        let n_embd = self.hyper().n_embd;
        for segment in self.segments() {
            let n = self.outputs.n_outputs(segment.segment.session).min(segment.n());
            if n == 0 {
                continue;
            }
            let rows = 4 * (segment.rows.end - n) * n_embd..4 * segment.rows.end * n_embd;
            let (stream, x, to) = (self.stream(), self.x().slice(rows), &mut self.b.x);
            self.state.staging.download(stream, &[x], &mut |_, bytes| floats(bytes, to))?;
            self.wait_for_peers()?;
            let h = &mut self.b.h[..n * n_embd];
            self.model.norm(self.cpu, &self.model.weights.output_norm, &self.b.x, h);
            let position = segment.segment.past + segment.n() - n;
            self.outputs.outputs(segment.segment.session, position, h);
        }
        Ok(())
    }

    /// output norm, output head
    pub fn logits(&mut self) -> Result<()> {
        let wanted: Vec<LogitRow> = self.batch.logit_rows().collect();
        if wanted.is_empty() {
            return Ok(());
        }
        for wanted in wanted.chunks(LOGITS_ROWS) {
            let products = self.logit_products(wanted)?;
            self.give_products(products, wanted)?;
        }
        Ok(())
    }

    /// x → h → the head's products of some rows, capped if logits are
    pub fn logit_products(&self, wanted: &[LogitRow]) -> Result<DeviceSlice<'a>> {
        let (norm, head) = self.dev.head.as_ref().expect("the head is on the device");
        let (n_embd, m) = (self.hyper().n_embd, wanted.len());
        let h = self.h().slice(0..4 * m * n_embd);
        let mut n_done = 0;
        for run in wanted.chunk_by(|a, b| a.row + 1 == b.row) {
            let of = |first: usize| 4 * first * n_embd..4 * (first + run.len()) * n_embd;
            self.norm(norm, self.x().slice(of(run[0].row)), h.slice(of(n_done)))?;
            n_done += run.len();
        }
        let acts = self.acts_of([head.weight.ty], m, h)?;
        let out = self.logit_room(m);
        self.linear(head, &acts, out)?;
        self.cap_products(out)?;
        Ok(out)
    }

    /// Memory for the head's products of so many rows.
    pub fn logit_room(&self, n: usize) -> DeviceSlice<'a> {
        self.words(&self.layout().logits, n * self.n_products())
    }

    /// The head's products of a row.
    pub fn n_products(&self) -> usize {
        self.dev.head.as_ref().map_or(0, |(_, head)| head.weight.rows)
    }

    /// The head's products → logits, if they are capped.
    fn cap_products(&self, products: DeviceSlice) -> Result<()> {
        let Some(cap) = self.hyper().logit_cap else { return Ok(()) };
        let rows = &self.dev.ops.rows;
        rows.divide(self.stream(), products, self.model.weights.logit_divisor)?;
        rows.soft_cap(self.stream(), products, cap)
    }

    /// The head's products of some rows → logits, handed on: the best of them, chosen on the
    /// device, for rows of which these suffice.
    fn give_products(&mut self, products: DeviceSlice, wanted: &[LogitRow]) -> Result<()> {
        let row_bytes = products.len() / wanted.len();
        let best = |row: &LogitRow| best_on_device(row.best, row_bytes / 4);
        let mut start = 0;
        for rows in wanted.chunk_by(|a, b| best(a).is_none() && best(b).is_none()) {
            let end = start + rows.len() * row_bytes;
            let products = products.slice(start..end);
            match best(&rows[0]) {
                Some(top) => {
                    self.choose_best(products, top)?;
                    self.give_best(top.k, top, rows[0])?;
                }
                None => self.all_logits(products, rows)?,
            }
            start = end;
        }
        Ok(())
    }

    /// Downloads the products of these rows and gives their logits handed on.
    pub fn all_logits(&mut self, products: DeviceSlice, rows: &[LogitRow]) -> Result<()> {
        let (stream, logits) = (self.stream(), &mut self.b.logits);
        let take = &mut |_, bytes: &[u8]| floats(bytes, logits);
        self.state.staging.download(stream, &[products], take)?;
        self.wait_for_peers()?;
        if self.hyper().logit_cap.is_none() {
            self.model.finish_logits(kernels(), &mut self.b.logits);
        }
        self.model.give_logits(&mut self.b.logits, rows, self.outputs);
        Ok(())
    }

    /// Chooses the best logits of a row on the device, of the values that `Model::finish_logits`
    /// makes of the products, unless that has been done.
    pub fn choose_best(&self, products: DeviceSlice, top: TopK) -> Result<()> {
        let TopK { k, n_vocab } = top;
        let all = sample::Logits {
            data: products.slice(0..4 * n_vocab),
            n_vocab,
            divisor: self.hyper().logit_cap.map_or(self.model.weights.logit_divisor, |_| 1.0),
            scratch: self.slice(&self.layout().top_k),
        };
        // Values and ids are downloaded as one piece.
        let best = self.words(&self.layout().best, 2 * k);
        let (values, ids) = (best.slice(0..4 * k), best.slice(4 * k..8 * k));
        self.dev.ops.sample.top_k(self.stream(), all, k, values, ids)
    }

    /// Downloads the best of the `n_chosen` logits of a row that the device has chosen, which are
    /// the first, and gives them handed on.
    pub fn give_best(&mut self, n_chosen: usize, top: TopK, row: LogitRow) -> Result<()> {
        let n_bytes = 4 * top.k;
        let best = self.words(&self.layout().best, 2 * n_chosen);
        let (stream, b) = (self.stream(), &mut *self.b);
        self.state.staging.download(stream, &[best], &mut |_, bytes| {
            floats(&bytes[..n_bytes], &mut b.logits);
            integers(&bytes[4 * n_chosen..][..n_bytes], &mut b.best_ids);
        })?;
        self.wait_for_peers()?;
        let (ids, logits) = (&self.b.best_ids, &self.b.logits);
        self.outputs.logits(row.session, row.token, Logits::Best { ids, logits });
        Ok(())
    }
}

/// The choice that the device makes: at most as many as its kernel can, and fewer than all.
pub fn best_on_device(best: Option<TopK>, n_logits: usize) -> Option<TopK> {
    let top = best?;
    let fits = top.n_vocab <= n_logits && (1..=TOP_K_MAX).contains(&top.k);
    (fits && top.k < top.n_vocab).then_some(top)
}
