//! How well each layer's choices were predicted, as `moeba trace train --report` writes it: lines
//! `layer;predictor;measure;value` behind a line of these names. A value is its measure's: see
//! `train::Accuracy` and `train::Times`, whose measures depend on the machine and the moment.

use std::collections::BTreeMap;
use std::fmt::Write;

pub const LLAPOR: &str = "llapor";
/// LLaPor from two layers before.
pub const LLAPOR_SECOND: &str = "llapor-2";
pub const GATE: &str = "gate";
pub const STATISTICS: &str = "statistics";
/// All that there may be, in the order of the tables.
pub const PREDICTORS: [&str; 4] = [LLAPOR, LLAPOR_SECOND, GATE, STATISTICS];

/// Measures of time: all of a layer's training, s, and the prediction of a token, µs.
pub const TRAINING: &str = "training_s";
pub const PREDICTION: &str = "prediction_us";

const NAMES: &str = "layer;predictor;measure;value";

/// One value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Among all of the model's.
    pub layer: usize,
    pub predictor: String,
    pub measure: String,
    pub value: f64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct LlaporReport {
    values: BTreeMap<(usize, String, String), f64>,
}

impl LlaporReport {
    pub fn push(&mut self, value: Value) {
        let Value { layer, predictor, measure, value } = value;
        self.values.insert((layer, predictor, measure), value);
    }

    pub fn get(&self, layer: usize, predictor: &str, measure: &str) -> Option<f64> {
        self.values.get(&(layer, predictor.to_string(), measure.to_string())).copied()
    }

    /// Layers with any value, in order.
    pub fn layers(&self) -> Vec<usize> {
        let mut layers: Vec<usize> = self.values.keys().map(|(layer, ..)| *layer).collect();
        layers.dedup();
        layers
    }

    /// The largest n of which `top{n}` was measured: the experts that a token uses.
    pub fn k(&self) -> Option<usize> {
        let n = |measure: &str| measure.strip_prefix("top")?.parse().ok();
        self.values.keys().filter_map(|(.., measure)| n(measure)).max()
    }

    pub fn encode(&self) -> String {
        let mut out = format!("{NAMES}\n");
        for ((layer, predictor, measure), value) in &self.values {
            writeln!(out, "{layer};{predictor};{measure};{value}").expect("a string takes it");
        }
        out
    }

    /// Returns the reason as a clause, for use after a colon.
    pub fn parse(text: &str) -> Result<LlaporReport, String> {
        let mut lines = text.lines();
        if lines.next().map(str::trim) != Some(NAMES) {
            return Err(format!("its first line is not {NAMES}"));
        }
        let mut report = LlaporReport::default();
        for (line, number) in lines.zip(2..).filter(|(line, _)| !line.trim().is_empty()) {
            report.push(value(line).map_err(|why| format!("line {number}: {why}"))?);
        }
        Ok(report)
    }
}

fn value(line: &str) -> Result<Value, String> {
    let fields: Vec<&str> = line.trim().split(';').collect();
    let [layer, predictor, measure, value] = fields[..] else {
        return Err(format!("{} fields, expected 4", fields.len()));
    };
    if !PREDICTORS.contains(&predictor) {
        return Err(format!("{predictor:?} is none of {}", PREDICTORS.join(", ")));
    }
    let number = value.parse::<f64>().ok().filter(|value| value.is_finite());
    Ok(Value {
        layer: layer.parse().map_err(|_| format!("{layer:?} is no layer"))?,
        predictor: predictor.to_string(),
        measure: measure.to_string(),
        value: number.ok_or_else(|| format!("{value:?} is no number"))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let mut report = LlaporReport::default();
        for (layer, measure, value) in [(3, "top1", 0.5), (0, "top2", 1.0 / 3.0), (3, "hot4", 1.0)]
        {
            let (predictor, measure) = (GATE.to_string(), measure.to_string());
            report.push(Value { layer, predictor, measure, value });
        }
        assert_eq!(LlaporReport::parse(&report.encode()), Ok(report.clone()));
        assert_eq!((report.layers(), report.k()), (vec![0, 3], Some(2)));
        assert_eq!(report.get(3, GATE, "hot4"), Some(1.0));
        assert_eq!(report.get(3, LLAPOR, "hot4"), None);
    }

    #[test]
    fn what_is_no_report_is_refused() {
        let refused = |text: &str| LlaporReport::parse(text).unwrap_err();
        assert!(refused("").contains("first line"));
        assert!(refused("layer;gate\n").contains("first line"));
        let line = |line: &str| refused(&format!("{NAMES}\n\n{line}\n"));
        assert!(line("0;gate;top1").starts_with("line 3: 3 fields"));
        assert!(line("0;other;top1;1").contains("\"other\""));
        assert!(line("-1;gate;top1;1").contains("no layer"));
        for bad in ["x", "", "nan", "inf"] {
            assert!(line(&format!("0;gate;top1;{bad}")).contains("no number"));
        }
    }
}
