use super::super::Inputs;
use super::*;
use moeba::policy::Phase;
use moeba::trace::Routing;
use moeba::trace::format::{Header, LayerShape, Precision, Trace, Writer};

const N_EXPERTS: [usize; 3] = [8, 0, 8];
const K: usize = 2;
const KINDS: [&str; 2] = ["a", "b"];
const N_REQUESTS: usize = 6;
const N_DECODE: usize = 10;

/// Highest for the chosen, in their order.
fn probs(chosen: &[u32], n: usize) -> Vec<f32> {
    let mut probs = vec![0.0; n];
    chosen.iter().zip([0.5, 0.25]).for_each(|(expert, p)| probs[*expert as usize] = p);
    probs
}

/// Requests of two kinds, one kind after the other, of a prompt of four tokens and some steps. The
/// look-ahead shows the same token's other layer.
fn trace() -> Trace {
    let layers = N_EXPERTS.map(|n_experts| match n_experts {
        0 => LayerShape::default(),
        _ => LayerShape { n_experts, expert_bytes: 4000, n_granules: 4, slot_bytes: 1000 },
    });
    let header = Header {
        model: "made up".into(),
        n_embd: 1,
        k: K,
        layers: layers.into(),
        precision: Precision::Exact,
        ahead: 1,
        ..Header::default()
    };
    let mut writer = Writer::new(Vec::new(), header).unwrap();
    let mut state = 1u32;
    let mut draw = |n: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % n
    };
    for request in 0..N_REQUESTS {
        writer.begin_request(KINDS[request * KINDS.len() / N_REQUESTS]).unwrap();
        let passes = [(Phase::Prompt, 4)].into_iter().chain([(Phase::Decode, 1); N_DECODE]);
        for (phase, n) in passes {
            writer.begin_pass(phase, &vec![0; n], &vec![1.0; n]).unwrap();
            for (layer, n_experts) in N_EXPERTS.into_iter().enumerate().filter(|(_, n)| *n > 0) {
                let mut tokens = Vec::new();
                for _ in 0..n {
                    let first = draw(4);
                    tokens.push([first, first + 1 + draw(3)]);
                }
                let all: Vec<f32> = tokens.iter().flat_map(|c| probs(c, n_experts)).collect();
                writer.routed(layer, tokens.as_flattened(), &all);
                writer.ahead(layer, 1, &probs(&tokens[0], n_experts));
            }
        }
    }
    Trace::decode(&writer.finish().unwrap(), std::path::Path::new("test")).unwrap()
}

#[test]
fn every_table_has_its_rows_and_their_figures() {
    let trace = trace();
    let mut inputs = Inputs::new(&trace, Some(&trace), None);
    inputs.n_warm_up = 1;
    let tables = all(&inputs).unwrap();
    let ids: Vec<&str> = tables.iter().map(|table| table.id).collect();
    let expected = [
        "moepic-table-1",
        "moepic-table-1-coarse",
        "moepic-fig-4b",
        "moepic-fig-4b-measured",
        "moepic-fig-4b-coarse",
        "moepic-table-3-fine",
        "moepic-table-3-measured",
        "moepic-table-3",
        "moepic-fig-8a",
        "moepic-fig-8a-measured",
        "moepic-fig-8b",
        "moepic-tau",
    ];
    assert_eq!(ids, expected);
    for table in &tables {
        let id = table.id;
        assert!(table.rows.len() >= 5 && !table.claims.is_empty(), "{id}");
        for row in &table.rows {
            assert_eq!(row.cells.len() + 1, table.columns.len(), "{id}: {}", row.name);
            assert!(!row.cells.iter().any(|cell| cell.to_string() == "—"), "{id}: {}", row.name);
        }
        assert!(table.claims.iter().all(|claim| claim.found.n > 0), "{id}");
    }
    assert!(tables[0].at_least("Belady (knows the future)", "LRU", 0.0));
    assert_eq!(all(&inputs).unwrap(), tables);
}

/// More memory never asks for less of it, and a looser target never for more.
#[test]
fn looser_targets_need_no_more_memory() {
    let trace = trace();
    let inputs = Inputs::new(&trace, None, None);
    for table in figure_8(&inputs).unwrap() {
        for system in super::memory::SYSTEMS {
            let gb = table.values(system);
            assert!(gb.windows(2).all(|pair| pair[0] >= pair[1]), "{}, {system}: {gb:?}", table.id);
        }
    }
}

#[test]
fn kinds_take_turns() {
    let trace = trace();
    let inputs = Inputs::new(&trace, None, None);
    let starts = |every| {
        let bench = Bench::new(&inputs, inputs.fine, every);
        let subset = bench.routing();
        assert_eq!(bench.n_decode(), subset.n_requests() * N_DECODE);
        let start = |request: usize| subset.passes(request)[0].tokens.start / (4 + N_DECODE);
        (0..subset.n_requests()).map(start).collect::<Vec<_>>()
    };
    assert_eq!(starts(1), [0, 3, 1, 4, 2, 5]);
    assert_eq!(starts(2), [0, 3, 2, 5]);
    assert_eq!(starts(9), [0, 3]);
}
