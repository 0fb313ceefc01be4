//! Speculative decoding. Tokens that probably come next are computed in one pass with the token
//! that surely does, and the sampler then chooses as without them: a draft only decides whether the
//! logits behind it are of use. Rows of a batch have the bits that they have alone, so the text is
//! the same, whatever was drafted.
//!
//! Drafts cost nothing where the text repeats itself ([`lookup`]), the request says what it
//! expects, or a grammar allows one continuation. Elsewhere a smaller model drafts, if one was
//! named, or a layer of the model that was trained to ([`next_token`]), if the file has one. A
//! [`Gate`] decides by measured times how many are worth a pass.

mod drafter;
mod gate;
mod lookup;
mod next_token;

pub(in crate::engine) use drafter::Drafter;
pub(in crate::engine) use gate::{Gate, PassTime};
pub(in crate::engine) use next_token::{NextTokenCompute, NextTokenText, best};

/// Drafts of a pass at most.
pub const MAX_DRAFTS: usize = 15;

/// When drafts are verified (`--spec`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecMode {
    /// Never: each pass computes one token of a text.
    #[default]
    Off,
    /// Drafts are verified where they save time, by what passes took so far.
    Auto,
    /// Whenever there is a draft.
    Always,
}

impl SpecMode {
    pub const NAMES: &str = "auto, off or always";
}

impl std::str::FromStr for SpecMode {
    type Err = String;

    fn from_str(name: &str) -> Result<SpecMode, String> {
        match name {
            "off" => Ok(SpecMode::Off),
            "auto" => Ok(SpecMode::Auto),
            "always" => Ok(SpecMode::Always),
            _ => Err(format!("expected {}, got {name:?}", SpecMode::NAMES)),
        }
    }
}

/// How a request's text is drafted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    pub mode: SpecMode,
    /// Token ids of the answer that the request expects, as far as it knows.
    pub prediction: Vec<u32>,
}

/// The origin of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftSource {
    /// An earlier place in the prompt or the answer.
    Text,
    /// The request's prediction.
    Prediction,
    /// Text that the grammar forces.
    Grammar,
    /// The model's layer that predicts the token after the next.
    Layer,
    /// A smaller model.
    Model,
}

impl DraftSource {
    pub const ALL: [DraftSource; 5] = [
        DraftSource::Text,
        DraftSource::Prediction,
        DraftSource::Grammar,
        DraftSource::Layer,
        DraftSource::Model,
    ];

    pub fn name(self) -> &'static str {
        match self {
            DraftSource::Text => "text",
            DraftSource::Prediction => "prediction",
            DraftSource::Grammar => "grammar",
            DraftSource::Layer => "layer",
            DraftSource::Model => "model",
        }
    }
}

/// Tokens that were computed as drafts, and those of them that the sampler chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafted {
    pub n: u64,
    pub n_accepted: u64,
}

/// Counts of drafts, by [`DraftSource`] in the order of [`DraftSource::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts(pub [Drafted; DraftSource::ALL.len()]);

impl DraftCounts {
    pub fn of(&self, source: DraftSource) -> Drafted {
        self.0[source as usize]
    }

    /// The counts of all sources together.
    pub fn all(&self) -> Drafted {
        let add = |a: Drafted, b: &Drafted| Drafted {
            n: a.n + b.n,
            n_accepted: a.n_accepted + b.n_accepted,
        };
        self.0.iter().fold(Drafted::default(), add)
    }

    pub(in crate::engine) fn add(&mut self, source: DraftSource, n: usize, n_accepted: usize) {
        let counts = &mut self.0[source as usize];
        counts.n += n as u64;
        counts.n_accepted += n_accepted as u64;
    }
}

/// Tokens that may come next in a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::engine) struct Draft {
    pub tokens: Vec<u32>,
    pub kind: Option<DraftKind>,
}

/// A draft as far as its chances depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct DraftKind {
    pub source: DraftSource,
    /// Tokens before the draft that are the same where it is from.
    pub n_matched: usize,
}
