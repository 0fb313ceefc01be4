//! How far the loading of a model is, and the work that it waits for.

use std::fmt;

/// The work that loading waits for, in the order in which it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LoadPhase {
    /// The header is read, devices are opened, and memory is planned.
    #[default]
    Plan,
    Peers,
    /// The pages of a mapped file are brought in.
    Pages,
    /// All weights are read.
    Weights,
    /// All weights but those of experts that are streamed.
    DenseWeights,
    ExpertMemory,
    Adapters,
    Device,
    /// The engine is there, and its user takes memory for keys and values.
    Texts,
}

impl LoadPhase {
    /// This work, where `part` of the whole load, from 0 to 1, is done.
    pub fn at(self, part: f32) -> Loading {
        Loading { phase: self, part }
    }
}

impl fmt::Display for LoadPhase {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            LoadPhase::Plan => "planning memory",
            LoadPhase::Peers => "connecting to peers",
            LoadPhase::Pages => "reading the file",
            LoadPhase::Weights => "reading weights",
            LoadPhase::DenseWeights => "reading dense weights",
            LoadPhase::ExpertMemory => "taking memory for experts",
            LoadPhase::Adapters => "reading adapters",
            LoadPhase::Device => "moving weights to the GPU",
            LoadPhase::Texts => "taking memory for texts",
        })
    }
}

/// How far a load is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loading {
    pub phase: LoadPhase,
    /// The part of the whole load that is done, from 0 to 1; it never shrinks.
    pub part: f32,
}

impl Loading {
    /// Thousandths that are done; the last one stands for the whole.
    pub fn thousandths(self) -> u64 {
        (f64::from(self.part) * 1000.0) as u64
    }
}

/// The work, and how far it is where that is known: `reading dense weights, 43 %`.
impl fmt::Display for Loading {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.part {
            part if part > 0.0 && part < 1.0 => write!(f, "{}, {:.0} %", self.phase, 100.0 * part),
            _ => self.phase.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_told_while_it_is_one() {
        assert_eq!(LoadPhase::DenseWeights.at(0.434).to_string(), "reading dense weights, 43 %");
        assert_eq!(LoadPhase::Plan.at(0.0).to_string(), "planning memory");
        assert_eq!(LoadPhase::Device.at(1.0).to_string(), "moving weights to the GPU");
        assert_eq!(
            (LoadPhase::Pages.at(0.9999).thousandths(), LoadPhase::Pages.at(1.0).thousandths()),
            (999, 1000)
        );
    }
}
