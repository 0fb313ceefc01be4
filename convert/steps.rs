//! The steps of a descriptor's row, applied: where elements go, and what becomes of their values.

use super::hparams::Sizes;
use super::json::Json;
use super::view::{Pairs, View};
use crate::Result;

/// A function of each value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Map {
    Add(f32),
    Exp,
    /// −eˣ
    NegExp,
    /// e⁻ˣ
    ExpNeg,
}

impl Map {
    pub fn apply(self, values: &mut [f32]) {
        match self {
            Map::Add(x) => values.iter_mut().for_each(|v| *v += x),
            // In f64, so that the last bit is the same on every machine.
            Map::Exp => values.iter_mut().for_each(|v| *v = f64::from(*v).exp() as f32),
            Map::NegExp => values.iter_mut().for_each(|v| *v = -f64::from(*v).exp() as f32),
            Map::ExpNeg => values.iter_mut().for_each(|v| *v = (-f64::from(*v)).exp() as f32),
        }
    }
}

/// A tensor on its way through the steps.
#[derive(Debug)]
pub struct Steps {
    pub view: View,
    pub maps: Vec<Map>,
}

/// A step is part of the program: one that does not parse is a bug, found by the test of all
/// descriptors.
#[derive(Debug, PartialEq)]
enum Step<'a> {
    View(&'a str),
    Take { dim: usize, from: &'a str, to: &'a str, by: &'a str },
    Swap(usize, usize),
    Squeeze,
    Turn(&'a str, Pairs),
    Map(Map),
}

impl Steps {
    pub fn of(shape: &[u64]) -> Steps {
        Steps { view: View::of(shape), maps: Vec::new() }
    }

    /// `None` if the shape is not one that the step can be done with.
    pub fn apply(&mut self, text: &str, sizes: &Sizes, config: &Json) -> Result<Option<()>> {
        let size = |text: &str| -> Result<u64> {
            let n = sizes.one(config, text)?;
            n.ok_or_else(|| config.fail(text, "a size", "nothing"))
        };
        Ok(match parse(text).unwrap_or_else(|| panic!("step {text:?}")) {
            Step::View(shape) => {
                let shape: Result<Vec<u64>> = shape.split(',').map(size).collect();
                self.view.reshape(&shape?)
            }
            Step::Take { dim, from, to, by } => {
                self.view.take(dim, size(from)?, size(to)?, size(by)?)
            }
            Step::Swap(a, b) => self.view.swap(a, b),
            Step::Squeeze => {
                self.view.squeeze();
                Some(())
            }
            Step::Turn(heads, from) => self.view.turn_pairs(size(heads)?, from),
            Step::Map(map) => {
                self.maps.push(map);
                Some(())
            }
        })
    }
}

fn parse(text: &str) -> Option<Step<'_>> {
    let (verb, rest) = text.split_once(' ').unwrap_or((text, ""));
    Some(match verb {
        "view" => Step::View(rest),
        "take" => {
            let (dim, range) = rest.split_once(':')?;
            let (from, to) = range.split_once("..")?;
            let (to, by) = to.split_once(" by ").unwrap_or((to, "1"));
            Step::Take { dim: dim.trim().parse().ok()?, from, to, by }
        }
        "swap" => {
            let (a, b) = rest.split_once(' ')?;
            Step::Swap(a.parse().ok()?, b.parse().ok()?)
        }
        "squeeze" if rest.is_empty() => Step::Squeeze,
        "rope-pairs" => Step::Turn(rest, Pairs::Halves),
        "rope-halves" => Step::Turn(rest, Pairs::Neighbours),
        "add" => Step::Map(Map::Add(rest.parse().ok()?)),
        "exp" if rest.is_empty() => Step::Map(Map::Exp),
        "neg-exp" if rest.is_empty() => Step::Map(Map::NegExp),
        "exp-neg" if rest.is_empty() => Step::Map(Map::ExpNeg),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::expr;
    use crate::model::descriptor::Descriptor;

    /// All steps, shapes and values of all descriptors.
    #[test]
    fn descriptors_speak_the_language() {
        let is_expression = |text: &str| assert!(expr::is_expression(text), "{text:?}");
        for d in Descriptor::all() {
            d.convert.sizes.values().flatten().for_each(|text| is_expression(text));
            d.convert.extra_layers.iter().for_each(|text| is_expression(text));
            d.convert.metadata().flat_map(|(_, row)| &row.from).for_each(|t| is_expression(t));
            for row in d.tensor_rows() {
                row.shape.split(',').for_each(is_expression);
                for step in &row.steps {
                    match parse(step) {
                        Some(Step::View(shape)) => shape.split(',').for_each(is_expression),
                        Some(Step::Take { from, to, by, .. }) => {
                            [from, to, by].into_iter().for_each(is_expression);
                        }
                        Some(Step::Turn(heads, _)) => is_expression(heads),
                        Some(_) => {}
                        None => panic!("{}: {step:?}", row.hf),
                    }
                }
            }
        }
    }

    #[test]
    fn other_texts_are_no_steps() {
        for text in ["", "turn 0 1", "take 0 1 2", "swap 1", "squeeze 1", "add x", "take x: 0 .. 1"]
        {
            assert_eq!(parse(text), None, "{text}");
        }
        let by = Step::Take { dim: 1, from: " 0 ", to: " 2 * ff", by: "2" };
        assert_eq!(parse("take 1: 0 .. 2 * ff by 2"), Some(by));
    }

    #[test]
    fn values_are_changed() {
        let mut values = [0.0, 1.0, -1.0];
        Map::Add(1.0).apply(&mut values);
        assert_eq!(values, [1.0, 2.0, 0.0]);
        Map::NegExp.apply(&mut values);
        assert_eq!(values, [-std::f32::consts::E, -7.389_056, -1.0]);
        Map::Exp.apply(&mut values[2..]);
        assert_eq!(values[2], 0.367_879_44);
        Map::ExpNeg.apply(&mut values[..1]);
        assert_eq!(values[0], 15.154_261);
    }
}
