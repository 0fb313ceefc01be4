//! LLaPor's trained networks on batches: what they predict of requests that they were not trained
//! on.

use crate::hybrid::keep_best;
use moeba::policy::LlaporModel;
use moeba::policy::papers::prescope::llapor::{LayerModel, Workspace};
use moeba::trace::format::Trace;

/// Networks, and what their training has left for others to judge them by.
#[derive(Clone, Debug)]
pub struct Trained {
    pub model: LlaporModel,
    /// Decoded tokens at the end of those that it was given, requests by turns of their kinds.
    pub n_held_out: usize,
}

pub struct Networks<'a> {
    trace: &'a Trace,
    model: &'a LlaporModel,
}

impl<'a> Networks<'a> {
    pub fn new(trace: &'a Trace, trained: &'a Trained) -> Networks<'a> {
        Networks { trace, model: &trained.model }
    }

    /// 1 for each of the k experts that are most probable so many MoE layers ahead, 0 for the
    /// others; nothing of layers beyond the second and after prompts' tokens. Replaces `out`.
    pub fn predict(&self, token: usize, layer: usize, distance: usize, out: &mut Vec<f32>) {
        out.clear();
        let (mut hidden, mut probs) = (Vec::new(), Vec::new());
        self.trace.hidden(token, layer, &mut hidden);
        let network = self.network(layer, distance).filter(|_| !hidden.is_empty());
        let Some(network) = network else { return };
        self.trace.probs(token, layer, &mut probs);
        let mut work = Workspace::default();
        network.forward(&hidden, self.trace.chosen(token, layer), &probs, &mut work);
        out.extend(&work.logits);
        keep_best(out, self.trace.header().k);
    }

    /// That of the MoE layer so far ahead, around the end to the next token's first.
    fn network(&self, layer: usize, distance: usize) -> Option<&'a LayerModel> {
        let networks = match distance {
            1 => &self.model.layers,
            2 => &self.model.second,
            _ => return None,
        };
        let (before, after) = networks.split_at(layer + 1);
        after.iter().chain(before).flatten().nth(distance - 1)
    }
}

/// The number of requests at the end of `order`, the order of training, of which no token was
/// trained on.
pub fn n_new(trace: &Trace, order: &[usize], n_held_out: usize) -> usize {
    let mut left = n_held_out;
    let n_decoded = |request: &usize| {
        let request = &trace.requests()[*request];
        request.tokens.len() - request.n_prompt
    };
    let fits = |request: &&usize| match left.checked_sub(n_decoded(request)) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    order.iter().rev().take_while(fits).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::prescope::all;
    use crate::tables::prescope::bench::{Bench, needed_share};
    use crate::tables::{Inputs, Source};
    use moeba::policy::Phase;
    use moeba::policy::papers::prescope::llapor::{Linear, Loss};
    use moeba::trace::format::{Header, LayerShape, Writer};
    use std::path::Path;

    const N_EXPERTS: usize = 8;
    const N_LAYERS: usize = 3;
    const N_DECODED: usize = 3;

    fn one_hot(chosen: &[u32]) -> Vec<f32> {
        (0..N_EXPERTS as u32).map(|e| f32::from(u8::from(chosen.contains(&e)))).collect()
    }

    /// Requests of a prompt's two tokens and some decode steps. What routers see is which experts
    /// the next layer chooses; the next router does not see it.
    fn trace(n_requests: usize) -> Trace {
        let layers = vec![LayerShape { n_experts: N_EXPERTS, ..LayerShape::default() }; N_LAYERS];
        let header =
            Header { n_embd: N_EXPERTS, k: 2, layers, ahead: 1, hidden: true, ..Header::default() };
        let mut writer = Writer::new(Vec::new(), header).unwrap();
        let mut draw = 1u32;
        let mut choice = || {
            draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let first = (draw >> 20) % 5;
            [first, first + 3]
        };
        for request in 0..n_requests {
            writer.begin_request(["prose", "code"][request % 2]).unwrap();
            let mut layers = || [(); N_LAYERS].map(|()| choice());
            let steps: Vec<[[u32; 2]; N_LAYERS]> = (0..N_DECODED + 2).map(|_| layers()).collect();
            for (pass, choices) in steps[..=N_DECODED].iter().enumerate() {
                let (phase, n) = if pass == 0 { (Phase::Prompt, 2) } else { (Phase::Decode, 1) };
                let embeddings = vec![0.5; n * N_EXPERTS];
                writer.begin_pass(phase, &vec![7; n], &embeddings).unwrap();
                let next = choices[1..].iter().chain(&steps[pass + 1][..1]);
                for (layer, (chosen, next)) in choices.iter().zip(next).enumerate() {
                    writer.routed(layer, &chosen.repeat(n), &vec![0.125; n * N_EXPERTS]);
                    if phase == Phase::Decode {
                        writer.ahead(layer, 1, &[0.125; N_EXPERTS]);
                        writer.hidden(layer, &one_hot(next));
                    }
                }
            }
        }
        Trace::decode(&writer.finish().unwrap(), Path::new("made up")).unwrap()
    }

    /// Hands on what the router saw.
    fn trained(n_held_out: usize) -> Trained {
        let unit = |n_in: usize| {
            let rows = (0..N_EXPERTS)
                .flat_map(|row| (0..n_in).map(move |column| f32::from(u8::from(row == column))));
            Linear::new(rows.collect(), vec![0.0; N_EXPERTS], n_in)
        };
        let layer = LayerModel {
            compress: unit(N_EXPERTS),
            input: unit(3 * N_EXPERTS),
            residual: None,
            output: unit(N_EXPERTS),
            loss: Loss { lambda: 1.0, gamma: 0.0, balance: vec![1.0; N_EXPERTS] },
        };
        layer.check().unwrap();
        let layers = vec![Some(layer); N_LAYERS];
        let model = LlaporModel { second: layers.clone(), layers };
        Trained { model, n_held_out }
    }

    #[test]
    fn the_next_layers_experts_are_predicted() {
        let (trace, trained) = (trace(1), trained(0));
        let networks = Networks::new(&trace, &trained);
        let mut out = vec![3.0];
        for token in 2..1 + N_DECODED {
            for layer in 0..N_LAYERS {
                let next = (layer + 1) / N_LAYERS;
                networks.predict(token, layer, 1, &mut out);
                assert_eq!(out, one_hot(trace.chosen(token + next, (layer + 1) % N_LAYERS)));
                // What the router saw is which experts the next layer chooses, and no more.
                networks.predict(token, layer, 2, &mut out);
                assert_eq!(out, one_hot(trace.chosen(token + next, (layer + 1) % N_LAYERS)));
                networks.predict(token, layer, 3, &mut out);
                assert!(out.is_empty());
            }
        }
        // What a prompt's routers saw is not in the trace.
        networks.predict(0, 0, 1, &mut out);
        assert!(out.is_empty());
    }

    #[test]
    fn a_request_of_which_a_token_was_learned_is_not_new() {
        let (trace, order) = (trace(4), [0, 2, 1, 3]);
        let new = |n_held_out| n_new(&trace, &order, n_held_out);
        assert_eq!([0, 2, 3, 5, 6, 11, 12, 100].map(new), [0, 0, 1, 1, 2, 3, 4, 4]);
    }

    /// They know, and the next router does not.
    #[test]
    fn prefetches_by_networks_are_needed() {
        let (full, trained) = (trace(48), trained(24 * N_DECODED));
        let source = Source::new(&full, "deepseek-v2-lite");
        let bench = Bench::new(source, Some(&trained)).unwrap();
        let options = bench.prescope("a100");
        let share = |reports: Vec<Option<_>>| {
            needed_share(&reports.into_iter().flatten().collect::<Vec<_>>())
        };
        let (llapor, gate) = (share(bench.run(&options)), share(bench.run_by_gate(&options)));
        assert!(llapor > 0.5 && llapor > gate + 0.25, "{llapor} {gate}");
    }

    #[test]
    fn the_ablation_has_a_row_for_the_gate() {
        let (fine, full) = (trace(12), trace(48));
        let mut inputs = Inputs::new(&fine, None, Some(&full));
        let by_gate = all(&inputs).unwrap();
        inputs.networks = Some(trained(16 * N_DECODED + 1));
        let tables = all(&inputs).unwrap();
        let [throughput, ablation, _] = &tables[..] else { panic!("{tables:?}") };
        assert_eq!(ablation.rows.len(), by_gate[1].rows.len() + 2);
        for row in ["LLaPor, but with the gate, a100", "LLaPor, but with the gate, v100"] {
            // Sixteen requests are new: batches of 4, 8 and 16.
            let losses = ablation.values(row);
            assert!(losses[..3].iter().all(|loss| loss.abs() > 0.0), "{losses:?}");
            assert!(losses[3..].iter().all(|loss| loss.is_nan()), "{losses:?}");
        }
        assert_eq!(ablation.claims.len(), by_gate[1].claims.len() + 1);
        for table in [throughput, ablation] {
            assert!(table.setting.contains("16 requests"), "{}", table.setting);
            assert!(table.setting.contains("not trained on these"), "{}", table.setting);
        }
        // Three requests make no batch.
        inputs.networks = Some(trained(4 * N_DECODED - 1));
        let error = all(&inputs).unwrap_err().to_string();
        assert!(error.contains("all requests of the trace but 3"), "{error}");
    }
}
