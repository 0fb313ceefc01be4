//! `-ot REGEX=CPU|CUDA0,…`, which says where tensors are by their names, as llama.cpp's flag does:
//! the first rule whose pattern is found in a name decides. Two things are moved as a whole: a
//! layer's routed experts, and a layer's dense weights with its KV cache. A rule that asks for a
//! part of either is refused.

use crate::{Error, Result};
use regex::Regex;
use std::str::FromStr;

/// Where a tensor is to be.
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
        let pattern = Regex::new(pattern).map_err(|_| wrong(format!("{pattern:?} is no pattern")));
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

/// What rules say of each whole: on a GPU or not; nothing where no rule speaks of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    pub layers: Vec<Option<bool>>,
    pub experts: Vec<Option<bool>>,
    pub head: Option<bool>,
    pub embedding: Option<bool>,
}

/// `devices`: the numbers of those that are used, the first of which has the dense weights.
pub fn resolve(rules: &[TensorPlace], names: &Names, devices: &[usize]) -> Result<Placed> {
    let of = |what: &str, names: &[String], may_spread: bool| {
        let side = whole(rules, what, names)?;
        side.map(|side| is_on_gpu(side, what, devices, may_spread)).transpose()
    };
    let mut placed = Placed {
        head: of("output", &names.head, false)?,
        embedding: of("embedding", &names.embedding, false)?,
        ..Placed::default()
    };
    for (l, layer) in names.layers.iter().enumerate() {
        let what = |part: &str| format!("{part} of layer {l}");
        placed.layers.push(of(&what("dense weights"), &layer.dense, false)?);
        placed.experts.push(of(&what("experts"), &layer.experts, true)?);
    }
    Ok(placed)
}

/// The one side of all these tensors.
fn whole(rules: &[TensorPlace], what: &str, names: &[String]) -> Result<Option<Side>> {
    let side = |name: &str| rules.iter().find(|r| r.pattern.is_match(name)).map(|r| r.side);
    let Some(first) = names.first() else { return Ok(None) };
    let Some(other) = names.iter().find(|name| side(name) != side(first)) else {
        return Ok(side(first));
    };
    let place = |name: &str| match side(name) {
        None => "where no rule puts it".into(),
        Some(Side::Cpu) => "on the CPU".into(),
        Some(Side::Gpu(n)) => format!("on GPU {n}"),
    };
    Err(Error::invalid(format!(
        "-ot leaves {first} {} and {other} {}, but the {what} are in one place: give a pattern \
         that matches all of them",
        place(first),
        place(other)
    )))
}

fn is_on_gpu(side: Side, what: &str, devices: &[usize], may_spread: bool) -> Result<bool> {
    let Side::Gpu(n) = side else { return Ok(false) };
    if !devices.contains(&n) {
        let used: Vec<String> = devices.iter().map(|n| format!("CUDA{n}")).collect();
        let used = used.join(", ");
        let why = format!("-ot puts the {what} on CUDA{n}, but what is used is {used} (--device)");
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
    fn a_part_of_a_whole_is_refused_with_both_names() {
        let cases: &[(&[&str], &[&str])] = &[
            (&["up_exps=CPU"], &["blk.1.ffn_gate_exps", "blk.1.ffn_up_exps", "experts of layer 1"]),
            (&["attn_q=CPU"], &["blk.0.attn_q", "blk.0.attn_output", "dense weights of layer 0"]),
            (&["up_exps=CUDA0", "exps=CPU"], &["on the CPU", "on GPU 0"]),
            // `attn_output` too.
            (&["output=CPU"], &["layer 0"]),
            (&["output_norm=CPU"], &["output.weight", "the output are"]),
        ];
        for (texts, words) in cases {
            let message = placed(texts).unwrap_err().to_string();
            for word in *words {
                assert!(message.contains(word), "no {word:?} in {message}");
            }
        }
    }

    #[test]
    fn gpus_are_those_that_are_used() {
        let on = |text: &str, devices: &[usize]| resolve(&rules(&[text]), &names(), devices);
        assert_eq!(on("exps=CUDA3", &[3]).unwrap().experts[1], Some(true));
        assert_eq!(on("^blk\\.0=CUDA3", &[3, 1]).unwrap().layers[0], Some(true));
        let cases = [
            ("exps=CUDA1", &[0][..], "what is used is CUDA0"),
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
            ("ex(ps=CPU", "\"ex(ps\" is no pattern"),
        ];
        for (text, word) in cases {
            let message = text.parse::<TensorPlace>().unwrap_err().to_string();
            assert!(message.contains(word) && message.contains("REGEX=CPU"), "{text}: {message}");
        }
    }
}
