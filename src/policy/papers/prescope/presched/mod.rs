//! PreScope's prefetch-aware cross-layer scheduling (4.3). Equations 4 to 7 are missing from the
//! text that we have; this is a reconstruction from its premises and questions.
//!
//! - Premise 1: S is the merged list, ascending by tokens, of what the current layer misses and
//!   what the next one is predicted to.
//! - Q1 (Eq. 4): from the heaviest down, S_k is worth the GPU while
//!   D + (loads so far + 1)·t_L < Σ_{i≤k} c(n_i): it is there before the CPU would be through with
//!   it and all that is lighter. Both sides move against each other, so this cuts S once
//!   (Premise 2). The current layer's part of the cut is then checked by itself (Eq. 5).
//! - Q2 (Eq. 6): the current layer's CPU part outlasts its uploads by a gap, to which the next
//!   attention adds; prefetches that fit into the gap cost nothing.
//! - Q3 (Eq. 7): one more, the critical prefetch, is cut off by the gap's end. A hit gains the part
//!   that is hidden, a miss delays the next layer's demand by the rest; it is issued if
//!   p_hit · hidden − (1 − p_hit) · rest > 0. The paper considers it only where the gap hides at
//!   least half of it, as it rounds the count to the nearest; the sign decides here. A miss delays
//!   the demand by a granule at most where loads can be interrupted between granules.
//! - Q4: where the cut holds nothing of the next layer, the layer after it is looked at in the
//!   same way, its gap lengthened by what the CPU will do for the layer between.
//!
//! If leading granules of an expert are on the GPU, its load brings the rest and takes that part of
//! t_L; S is ordered by tokens for the time of a whole load.
//!
//! The paper does not prefetch experts that the cut leaves to the CPU. If loads give way to demand,
//! an idle link may as well bring them, so the engine fills the gap with those too, nearest layers
//! first (`PreSched::filling`).

use crate::policy::placement::{Missing, Placement, Schedule, Timer, View, sort_ascending};

/// Layers that are looked at ahead: the next, and if that needs nothing the one after it.
const N_AHEAD: usize = 2;

#[derive(Clone, Debug, Default)]
pub struct PreSched {
    /// Whether prefetches fill the gap, worth the GPU by the cut or not, from any layer.
    fills: bool,
    current: Vec<Missing>,
    ahead: Vec<Missing>,
    /// S, with whether it is of the layer ahead.
    merged: Vec<(Missing, bool)>,
}

impl Placement for PreSched {
    fn place(&mut self, view: &View, out: &mut Schedule) {
        let timer = &view.timer;
        out.clear();
        self.set_current(view);
        // Q1
        let (worth, _) = self.cut(view, 0);
        let n_upload = uploads(timer, view.delay_ns, &self.current, worth);
        out.split(&self.current, n_upload);
        // Q2
        let (on_cpu, on_gpu) = self.current.split_at(self.current.len() - n_upload);
        let link_ns = view.delay_ns + link_ns(timer, on_gpu);
        let gap_ns = (cpu_ns(timer, on_cpu) - link_ns).max(0.0) + timer.attention_ns;
        self.prefetch(view, gap_ns, out);
    }
}

impl PreSched {
    /// Fills the gaps that the link has.
    pub fn filling() -> PreSched {
        PreSched { fills: true, ..PreSched::default() }
    }

    /// Appends the prefetches that pay if the link has nothing else to do for `gap_ns`.
    pub fn prefetch(&mut self, view: &View, mut gap_ns: f64, out: &mut Schedule) {
        let timer = &view.timer;
        self.set_current(view);
        let n_layers = if self.fills { view.predicted.len() } else { N_AHEAD };
        for (distance, layer) in view.predicted.iter().enumerate().take(n_layers) {
            let (_, n_worth) = self.cut(view, distance);
            let n_wanted = if self.fills { self.ahead.len() } else { n_worth };
            // Q3
            let n = prefetches(timer, gap_ns, layer.p_hit).saturating_sub(out.prefetch.len());
            let left = self.ahead.len() - n.min(n_wanted);
            let heaviest = self.ahead[left..].iter().rev();
            out.prefetch.extend(heaviest.map(|m| (distance + 1, m.expert)));
            if n_wanted > 0 && !self.fills {
                return;
            }
            // Q4
            gap_ns += cpu_ns(timer, &self.ahead[..left]) + timer.attention_ns;
        }
    }

    fn set_current(&mut self, view: &View) {
        self.current.clear();
        self.current.extend(view.current);
        sort_ascending(&mut self.current);
    }

    /// How many of the current layer's and of a predicted layer's experts are worth the GPU; the
    /// latter are in `self.ahead` afterwards, ascending.
    fn cut(&mut self, view: &View, distance: usize) -> (usize, usize) {
        self.ahead.clear();
        let layer = view.predicted.get(distance);
        self.ahead.extend(layer.into_iter().flat_map(|layer| &layer.missing));
        sort_ascending(&mut self.ahead);
        self.merged.clear();
        // Of equals what is only predicted counts as lighter.
        self.merged.extend(self.ahead.iter().map(|m| (*m, true)));
        self.merged.extend(self.current.iter().map(|m| (*m, false)));
        self.merged.sort_by(|a, b| a.0.weight().total_cmp(&b.0.weight()));
        let timer = &view.timer;
        let mut sum: f64 = self.merged.iter().map(|(m, _)| timer.cpu_ns(m.n_tokens)).sum();
        let (mut n_current, mut n_ahead, mut loads) = (0, 0, 0.0);
        for (missing, is_ahead) in self.merged.iter().rev() {
            loads += missing.part;
            if view.delay_ns + loads * timer.load_ns >= sum {
                break;
            }
            sum -= timer.cpu_ns(missing.n_tokens);
            *(if *is_ahead { &mut n_ahead } else { &mut n_current }) += 1;
        }
        (n_current, n_ahead)
    }
}

fn cpu_ns(timer: &Timer, missing: &[Missing]) -> f64 {
    missing.iter().map(|m| timer.cpu_ns(m.n_tokens)).sum()
}

fn link_ns(timer: &Timer, missing: &[Missing]) -> f64 {
    missing.iter().map(|m| m.part * timer.load_ns).sum()
}

/// Eq. 5: of the `worth` heaviest of the layer, those that it would upload by itself.
fn uploads(timer: &Timer, delay_ns: f64, ascending: &[Missing], worth: usize) -> usize {
    let n = ascending.len();
    let pays = |uploads: usize| {
        let link_ns = delay_ns + link_ns(timer, &ascending[n - uploads..]);
        link_ns < cpu_ns(timer, &ascending[..n - uploads + 1])
    };
    (1..=worth).take_while(|uploads| pays(*uploads)).count()
}

/// Prefetches that fit into the gap, and the critical one if it pays.
fn prefetches(timer: &Timer, gap_ns: f64, p_hit: f64) -> usize {
    let whole = (gap_ns / timer.load_ns).floor();
    let hidden_ns = gap_ns - whole * timer.load_ns;
    let rest_ns = (timer.load_ns - hidden_ns).min(timer.granule_ns);
    let critical = p_hit * hidden_ns - (1.0 - p_hit) * rest_ns > 0.0;
    whole as usize + usize::from(critical)
}

#[cfg(test)]
mod tests;
