//! Where the experts of a layer are computed when the CPU and a GPU share the work: those that the
//! GPU has not are computed on the CPU or uploaded, and what the next layers will need can be
//! brought ahead. A placement plans one layer at a time, by costs that a Timer has measured.

/// What things take, ns. An expert with n tokens on the CPU takes a·n + b; experts that the GPU
/// computes cost it less than their load, so only loads are counted (PreScope 4.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timer {
    /// a
    pub cpu_token_ns: f64,
    /// b
    pub cpu_start_ns: f64,
    /// t_L: bringing one expert. Loads go one after another.
    pub load_ns: f64,
    /// A layer's attention.
    pub attention_ns: f64,
}

impl Timer {
    pub fn cpu_ns(&self, n_tokens: f64) -> f64 {
        self.cpu_token_ns * n_tokens + self.cpu_start_ns
    }
}

/// An expert of some layer that the GPU has not, and nothing brings it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Missing {
    /// Within its layer.
    pub expert: u32,
    /// Tokens of the batch that need it, or are predicted to: finite and positive.
    pub n_tokens: f64,
}

/// What a placement sees when a layer's router has chosen.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub timer: Timer,
    /// Of the layer itself, in any order.
    pub current: &'a [Missing],
    /// Predicted, of the MoE layers that follow, the nearest first.
    pub predicted: &'a [Vec<Missing>],
    /// D: the rest of the transfer that is running, ns.
    pub delay_ns: f64,
    /// How often a prefetch has been needed so far.
    pub p_hit: f64,
}

/// Each of the layer's missing experts is in `upload` or in `cpu`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    /// In the order of transfer.
    pub upload: Vec<u32>,
    /// In the order of computation.
    pub cpu: Vec<u32>,
    /// What follows on the link: how many layers ahead, from 1, and the expert there. A prefetch
    /// that has not begun when the next layer's router has chosen is void.
    pub prefetch: Vec<(usize, u32)>,
}

impl Schedule {
    pub fn clear(&mut self) {
        self.upload.clear();
        self.cpu.clear();
        self.prefetch.clear();
    }

    /// The heaviest `n_upload` are uploaded, heaviest first; the others go to the CPU likewise.
    pub fn split(&mut self, ascending: &[Missing], n_upload: usize) {
        let (cpu, upload) = ascending.split_at(ascending.len() - n_upload);
        self.upload.extend(upload.iter().rev().map(|m| m.expert));
        self.cpu.extend(cpu.iter().rev().map(|m| m.expert));
    }
}

/// Where to compute, and what to bring ahead.
pub trait Placement: Send {
    /// Replaces the contents of `out`.
    fn place(&mut self, view: &View, out: &mut Schedule);
}

/// By tokens; of equals the higher id first, so that the lower counts as heavier.
pub fn sort_ascending(missing: &mut [Missing]) {
    missing.sort_by(|a, b| a.n_tokens.total_cmp(&b.n_tokens).then(b.expert.cmp(&a.expert)));
}
