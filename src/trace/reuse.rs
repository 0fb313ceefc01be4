//! How much a trace's routing leaves for a cache: experts that are used again at once, and experts
//! that are used more than others.

use super::format::Trace;

/// Shares of expert uses, in all layers together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reuse {
    /// Uses of experts that the token before used in the same layer.
    pub of_last_token: f64,
    /// Uses of the quarter of a layer's experts that is used most.
    pub of_hottest_quarter: f64,
}

impl Reuse {
    pub fn of(trace: &Trace) -> Reuse {
        let (mut uses, mut again, mut after, mut hottest) = (0, 0, 0, 0);
        for layer in trace.header().moe_layers() {
            let mut counts = vec![0_u64; trace.header().layers[layer].n_experts];
            for token in 0..trace.n_tokens() {
                trace.chosen(token, layer).iter().for_each(|e| counts[*e as usize] += 1);
            }
            counts.sort_unstable_by(|a, b| b.cmp(a));
            uses += counts.iter().sum::<u64>();
            hottest += counts[..counts.len().div_ceil(4)].iter().sum::<u64>();
            for request in trace.requests() {
                for token in request.tokens.clone().skip(1) {
                    let last = trace.chosen(token - 1, layer);
                    let now = trace.chosen(token, layer);
                    after += now.len() as u64;
                    again += now.iter().filter(|expert| last.contains(expert)).count() as u64;
                }
            }
        }
        let share = |part: u64, all: u64| part as f64 / all.max(1) as f64;
        Reuse { of_last_token: share(again, after), of_hottest_quarter: share(hottest, uses) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Phase;
    use crate::trace::format::{Header, LayerShape, Writer};
    use std::path::Path;

    /// Requests of prompts with two of eight experts a token, after a dense layer.
    fn trace(requests: &[&[[u32; 2]]]) -> Trace {
        let moe = LayerShape { n_experts: 8, expert_bytes: 1, n_granules: 1, slot_bytes: 1 };
        let layers = vec![LayerShape::default(), moe];
        let header = Header { n_embd: 1, k: 2, layers, ..Header::default() };
        let mut writer = Writer::new(Vec::new(), header).unwrap();
        for tokens in requests {
            let n = tokens.len();
            writer.begin_request("text").unwrap();
            writer.begin_pass(Phase::Prompt, &vec![0; n], &vec![0.0; n]).unwrap();
            writer.routed(1, tokens.as_flattened(), &vec![0.125; 8 * n]);
        }
        Trace::decode(&writer.finish().unwrap(), Path::new("made up")).unwrap()
    }

    #[test]
    fn a_token_is_compared_with_the_one_before_of_its_request() {
        let reuse = Reuse::of(&trace(&[&[[0, 1], [1, 2], [2, 1]], &[[2, 1], [3, 4]]]));
        // 1; 1 and 2; none.
        assert_eq!(reuse.of_last_token, 3.0 / 6.0);
        // Experts 1 and 2 of eight.
        assert_eq!(reuse.of_hottest_quarter, 7.0 / 10.0);
    }

    #[test]
    fn a_single_token_has_none_before_it() {
        assert_eq!(Reuse::of(&trace(&[&[[0, 1]]])).of_last_token, 0.0);
    }
}
