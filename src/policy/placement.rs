//! Placement of a layer's experts when the CPU and a GPU share the work: experts that are missing
//! on the GPU are computed on the CPU or uploaded, and experts of the next layers can be
//! prefetched. A placement plans one layer at a time, by measured costs.

/// Measured costs, ns. An expert with n tokens takes a·n + b on the CPU. On the GPU it takes less
/// than its load, so only loads are counted (PreScope 4.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timer {
    /// a
    pub cpu_token_ns: f64,
    /// b
    pub cpu_start_ns: f64,
    /// t_L: loading one whole expert. Loads go one after another.
    pub load_ns: f64,
    /// How long a load that has begun keeps a demand waiting: the time of a granule, or `load_ns`
    /// where experts are loaded whole (PreScope, Premise 3).
    pub granule_ns: f64,
    /// A layer's attention.
    pub attention_ns: f64,
}

impl Timer {
    pub fn cpu_ns(&self, n_tokens: f64) -> f64 {
        self.cpu_token_ns * n_tokens + self.cpu_start_ns
    }
}

/// An expert that is not on the GPU as a whole, nor being loaded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Missing {
    /// Within its layer.
    pub expert: u32,
    /// Tokens of the batch that need it, or are predicted to: finite and positive.
    pub n_tokens: f64,
    /// The part of it that a load would bring, above 0 and at most 1: its leading granules may be
    /// on the GPU (MoEpic, section 4).
    pub part: f64,
}

impl Missing {
    /// An expert that is missing as a whole.
    pub fn whole(expert: u32, n_tokens: f64) -> Missing {
        Missing { expert, n_tokens, part: 1.0 }
    }

    /// Tokens for the time of a whole load.
    pub fn weight(&self) -> f64 {
        self.n_tokens / self.part
    }
}

/// Experts that are predicted for a following MoE layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PredictedLayer {
    pub missing: Vec<Missing>,
    /// How often an expert that was predicted as far ahead has been needed so far.
    pub p_hit: f64,
}

/// The input of a placement, after a layer's router has chosen.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub timer: Timer,
    /// Missing experts of the layer itself, in any order.
    pub current: &'a [Missing],
    /// The following MoE layers, the nearest first.
    pub predicted: &'a [PredictedLayer],
    /// D: the rest of the transfer that is running, ns.
    pub delay_ns: f64,
}

/// Each of the layer's missing experts is in `upload`, in `cpu` or in `in_place`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    /// In the order of transfer.
    pub upload: Vec<u32>,
    /// In the order of computation.
    pub cpu: Vec<u32>,
    /// Experts that the GPU reads where they are in the host's memory, for this layer alone.
    pub in_place: Vec<u32>,
    /// Prefetches after the uploads: the number of layers ahead, from 1, and the expert. A prefetch
    /// that has not started when the next layer's router has chosen is dropped.
    pub prefetch: Vec<(usize, u32)>,
}

impl Schedule {
    pub fn clear(&mut self) {
        self.upload.clear();
        self.cpu.clear();
        self.in_place.clear();
        self.prefetch.clear();
    }

    /// The heaviest `n_upload` are uploaded, heaviest first; the others go to the CPU likewise.
    pub fn split(&mut self, ascending: &[Missing], n_upload: usize) {
        let (cpu, upload) = ascending.split_at(ascending.len() - n_upload);
        self.upload.extend(upload.iter().rev().map(|m| m.expert));
        self.cpu.extend(cpu.iter().rev().map(|m| m.expert));
    }
}

/// Decides where experts are computed and which ones are prefetched.
pub trait Placement: Send {
    /// Replaces the contents of `out`.
    fn place(&mut self, view: &View, out: &mut Schedule);
}

/// By weight; of equals the higher id first, so that the lower counts as heavier.
pub fn sort_ascending(missing: &mut [Missing]) {
    missing.sort_by(|a, b| a.weight().total_cmp(&b.weight()).then(b.expert.cmp(&a.expert)));
}
