//! `-ot REGEX=CPU|CUDA0,…`, which says where tensors are by their names, as llama.cpp's flag does:
//! the first rule whose pattern is found in a name decides. Two things are moved as a whole: a
//! layer's routed experts, and a layer's dense weights with its KV cache. Where rules name a part,
//! experts of which some are to be on the CPU all are; anything else is where it would be without.
//! Both are said.

use crate::{Error, Result};
use regex::Regex;
use std::str::FromStr;

/// The place of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Cpu,
    /// The GPU of this number.
    Gpu(usize),
}

/// One rule.
#[derive(Clone, Debug)]
pub struct TensorPlace {
    pattern: Regex,
    side: Side,
}

impl FromStr for TensorPlace {
    type Err = Error;

    /// `REGEX=CPU` or `REGEX=CUDA0`; the pattern ends at the first `=`.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = |why: String| Error::Usage(format!("{why}: expected REGEX=CPU or REGEX=CUDA0"));
        let Some((pattern, side)) = text.split_once('=') else {
            return Err(wrong("there is no =".into()));
        };
        if pattern.is_empty() {
            return Err(wrong("there is no pattern".into()));
        }
        let upper = side.trim().to_ascii_uppercase();
        let side = match upper.strip_prefix("CUDA") {
            Some(n) => n.parse().ok().map(Side::Gpu),
            None => (upper == "CPU").then_some(Side::Cpu),
        };
        let side = side.ok_or_else(|| wrong(format!("{:?} is no place", upper)))?;
        let pattern = Regex::new(pattern)
            .map_err(|_| wrong(format!("{pattern:?} is not a valid regular expression")));
        Ok(TensorPlace { pattern: pattern?, side })
    }
}

/// The names of a model's tensors, by what is moved as a whole.
#[derive(Clone, Debug, Default)]
pub struct Names {
    pub layers: Vec<LayerNames>,
    /// The last norm and the output matrix, unless that is the embedding.
    pub head: Vec<String>,
    pub embedding: Vec<String>,
}

#[derive(Clone, Debug, Default)]
pub struct LayerNames {
    pub dense: Vec<String>,
    pub experts: Vec<String>,
}

/// The places that rules give to each whole: whether it is on a GPU; `None` without a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    pub layers: Vec<Option<bool>>,
    pub experts: Vec<Option<bool>>,
    pub head: Option<bool>,
    pub embedding: Option<bool>,
    /// A sentence for each kind of whole of which rules name only a part.
    pub notes: Vec<String>,
}

/// `devices`: the numbers of those that are used, the first of which has the dense weights.
pub fn resolve(rules: &[TensorPlace], names: &Names, devices: &[usize]) -> Result<Placed> {
    let mut notes = Vec::new();
    let mut of = |kind: Kind, wholes: Vec<(String, &[String])>| -> Result<Vec<Option<bool>>> {
        let mut parts = Vec::new();
        let place = |(what, names): (String, &[String])| {
            let side = match whole(rules, names) {
                Whole::One(side) => side,
                Whole::Parts { named, on_cpu } => {
                    parts.push((what.clone(), named.to_owned()));
                    Some(Side::Cpu).filter(|_| on_cpu && kind == Kind::Experts)
                }
            };
            side.map(|side| is_on_gpu(side, &what, devices, kind == Kind::Experts)).transpose()
        };
        let placed = wholes.into_iter().map(place).collect();
        notes.extend(note(kind, &parts));
        placed
    };
    let of_layers = |what: &str, part: fn(&LayerNames) -> &[String]| {
        let layers = names.layers.iter().enumerate();
        layers.map(|(l, layer)| (format!("{what} of layer {l}"), part(layer))).collect()
    };
    let experts = of(Kind::Experts, of_layers("experts", |layer| &layer.experts))?;
    let layers = of(Kind::Dense, of_layers("dense weights", |layer| &layer.dense))?;
    let head = of(Kind::Dense, vec![("output".into(), &names.head)])?[0];
    let embedding = of(Kind::Dense, vec![("embedding".into(), &names.embedding)])?[0];
    Ok(Placed { layers, experts, head, embedding, notes })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Experts,
    Dense,
}

/// The places that rules give to tensors that are moved together.
enum Whole<'a> {
    One(Option<Side>),
    /// Not the same of all: the first that a rule names, and whether one is to be on the CPU.
    Parts {
        named: &'a str,
        on_cpu: bool,
    },
}

fn whole<'a>(rules: &[TensorPlace], names: &'a [String]) -> Whole<'a> {
    let side = |name: &str| rules.iter().find(|r| r.pattern.is_match(name)).map(|r| r.side);
    let first = names.first().and_then(|name| side(name));
    if names.iter().all(|name| side(name) == first) {
        return Whole::One(first);
    }
    let named = names.iter().find(|name| side(name).is_some()).expect("they differ");
    Whole::Parts { named, on_cpu: names.iter().any(|name| side(name) == Some(Side::Cpu)) }
}

/// The note about wholes of one kind of which rules name a part, with the first such tensor of
/// each.
fn note(kind: Kind, parts: &[(String, String)]) -> Option<String> {
    let (what, named) = parts.first()?;
    let others = match parts.len() {
        1 => String::new(),
        n => format!(" and of {} more", n - 1),
    };
    let end = match kind {
        Kind::Experts => "and are on the CPU if a part of them is",
        Kind::Dense => "and stay where they would be without",
    };
    Some(format!(
        "-ot names a part of the {what}{others} ({named}), but they are moved as a whole, {end}"
    ))
}

fn is_on_gpu(side: Side, what: &str, devices: &[usize], may_spread: bool) -> Result<bool> {
    let Side::Gpu(n) = side else { return Ok(false) };
    if !devices.contains(&n) {
        let used: Vec<String> = devices.iter().map(|n| format!("CUDA{n}")).collect();
        let used = used.join(", ");
        let why = format!("-ot puts the {what} on CUDA{n}, but --device uses only {used}");
        return Err(Error::invalid(why));
    }
    if devices.len() > 1 && may_spread {
        return Err(Error::invalid(format!(
            "-ot puts the {what} on CUDA{n}, but experts are spread over all GPUs that are used: \
             choose one with --device"
        )));
    }
    if devices[0] != n {
        let first = devices[0];
        return Err(Error::invalid(format!(
            "-ot puts the {what} on CUDA{n}, but dense weights are on the first GPU, CUDA{first}: \
             change their order in --device"
        )));
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers, the first of them dense.
    fn names() -> Names {
        let layer = |l: usize, dense: &[&str], experts: &[&str]| LayerNames {
            dense: dense.iter().map(|name| format!("blk.{l}.{name}.weight")).collect(),
            experts: experts.iter().map(|name| format!("blk.{l}.{name}.weight")).collect(),
        };
        Names {
            layers: vec![
                layer(0, &["attn_q", "attn_output", "ffn_up"], &[]),
                layer(1, &["attn_q", "attn_output"], &["ffn_gate_exps", "ffn_up_exps"]),
            ],
            head: vec!["output_norm.weight".into(), "output.weight".into()],
            embedding: vec!["token_embd.weight".into()],
        }
    }

    fn rules(texts: &[&str]) -> Vec<TensorPlace> {
        texts.iter().map(|text| text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))).collect()
    }

    fn placed(texts: &[&str]) -> Result<Placed> {
        resolve(&rules(texts), &names(), &[0])
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let none = Placed { layers: vec![None; 2], experts: vec![None; 2], ..Placed::default() };
        assert_eq!(placed(&[]).unwrap(), none);
        assert_eq!(placed(&["blk\\.7\\.=CPU"]).unwrap(), none);
        let experts = |on| Placed { experts: vec![None, Some(on)], ..none.clone() };
        assert_eq!(placed(&["exps=CPU"]).unwrap(), experts(false));
        assert_eq!(placed(&["blk\\.1\\.ffn_.*_exps=cuda0", "exps=CPU"]).unwrap(), experts(true));
        assert_eq!(placed(&["exps=CPU", "exps=CUDA0"]).unwrap(), experts(false));
        let first = Placed { layers: vec![Some(false), None], ..none.clone() };
        assert_eq!(placed(&["^blk\\.0\\.=CPU"]).unwrap(), first);
        let ends = Placed { head: Some(false), embedding: Some(true), ..none };
        assert_eq!(placed(&["^output=CPU", "token_embd=CUDA0"]).unwrap(), ends);
    }

    #[test]
    fn a_part_of_a_whole_is_said() {
        let (yes, no) = (Some(true), Some(false));
        // Experts, dense weights, output; words of the note.
        type Case<'a> = (&'a [&'a str], [Option<bool>; 2], [Option<bool>; 2], &'a [&'a str]);
        let cases: &[Case] = &[
            (&["up_exps=CPU"], [None, no], [None; 2], &["experts of layer 1 (blk.1.ffn_up"]),
            (&["up_exps=CUDA0", "exps=CPU"], [None, no], [None; 2], &["if a part of them is"]),
            (&["up_exps=CUDA0"], [None; 2], [None; 2], &["experts of layer 1"]),
            (&["exps=CUDA0", "0.attn_q=CPU"], [None, yes], [None; 2], &["stay where they would"]),
            (&["attn_q=CPU"], [None; 2], [None; 2], &["of layer 0 and of 1 more (blk.0.attn_q"]),
            (&["output_norm=CPU"], [None; 2], [None; 2], &["the output (output_norm.weight)"]),
            (
                &["blk.0=CPU", "1.attn_q=CPU"],
                [None; 2],
                [no, None],
                &["dense weights of layer 1 ("],
            ),
        ];
        for (texts, experts, layers, words) in cases {
            let placed = placed(texts).unwrap();
            assert_eq!((&placed.experts[..], &placed.layers[..]), (&experts[..], &layers[..]));
            assert_eq!((placed.head, placed.notes.len()), (None, 1), "{texts:?}");
            for word in *words {
                assert!(placed.notes[0].contains(word), "no {word:?} in {}", placed.notes[0]);
            }
        }
        // `attn_output` and `output_norm` too.
        let placed = placed(&["output=CPU"]).unwrap();
        assert_eq!((placed.head, placed.notes.len()), (no, 1));
    }

    #[test]
    fn gpus_are_those_that_are_used() {
        let on = |text: &str, devices: &[usize]| resolve(&rules(&[text]), &names(), devices);
        assert_eq!(on("exps=CUDA3", &[3]).unwrap().experts[1], Some(true));
        assert_eq!(on("^blk\\.0=CUDA3", &[3, 1]).unwrap().layers[0], Some(true));
        let cases = [
            ("exps=CUDA1", &[0][..], "--device uses only CUDA0"),
            ("exps=CUDA0", &[0, 1], "spread over all GPUs"),
            ("^blk\\.0=CUDA1", &[0, 1], "first GPU, CUDA0"),
        ];
        for (text, devices, word) in cases {
            let message = on(text, devices).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn other_texts_are_no_rules() {
        let cases = [
            ("", "no ="),
            ("exps", "no ="),
            ("=CPU", "no pattern"),
            ("exps=", "no place"),
            ("exps=GPU", "\"GPU\""),
            ("exps=CUDA", "no place"),
            ("exps=CUDA-1", "no place"),
            ("ex(ps=CPU", "\"ex(ps\" is not a valid regular expression"),
        ];
        for (text, word) in cases {
            let message = text.parse::<TensorPlace>().unwrap_err().to_string();
            assert!(message.contains(word) && message.contains("REGEX=CPU"), "{text}: {message}");
        }
    }
}
