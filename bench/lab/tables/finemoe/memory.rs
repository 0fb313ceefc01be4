//! Figure 18: memory of the Expert Map Store.

use super::stated;
use crate::tables::{Axes, Cell, Claim, Inputs, Row, Table, columns};
use moeba::Result;
use moeba::policy::Shape;
use moeba::policy::papers::finemoe::MapStore;

const CAPACITIES: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// 1K
const UNIT: usize = 1024;

/// Name, MoE layers, experts of a layer and of a token: Table 1.
const MODELS: [(&str, usize, usize, usize); 3] =
    [("Mixtral-8×7B", 32, 8, 2), ("Qwen1.5-MoE", 24, 60, 4), ("Phi-3.5-MoE", 32, 16, 2)];

/// Figure 18, for the published shapes; it does not depend on the inputs.
pub fn figure_18(_: &Inputs) -> Result<Vec<Table>> {
    let rows = MODELS.map(|(name, n_layers, n_experts, k)| {
        let shape = Shape::of_model(vec![n_experts; n_layers], k);
        let megabytes = |capacity| MapStore::new(&shape, UNIT * capacity, 3).bytes() as f64 / 1e6;
        Row::numbers(name, 1, CAPACITIES.map(megabytes))
    });
    let mut table = Table {
        id: "finemoe-fig-18",
        title: "FineMoE, Figure 18: memory of the Expert Map Store, by capacity".into(),
        setting: "Shapes of the published models; maps and embeddings as our store compresses \
                  them, MB, by thousands (1024) of maps."
            .into(),
        columns: columns("model", CAPACITIES.map(|capacity| format!("{capacity} K"))),
        rows: rows.to_vec(),
        paper: Some(stated(
            "a plot, of which the text states",
            &[
                ("32K maps", "less than 200 MB"),
                ("Qwen1.5-MoE", "more than the other two, as it has more experts a layer"),
            ],
        )),
        claims: Vec::new(),
        plot: Some(Axes { x: "capacity, thousands of maps".into(), y: "memory, MB".into() }),
    };
    let largest = |row: &Row| row.cells.last().and_then(Cell::value).unwrap_or(f64::NAN);
    let [mixtral, qwen, phi] = MODELS.map(|(name, ..)| name);
    table.claims = vec![
        Claim::new(
            "32K maps take less than 200 MB",
            table.rows.iter().all(|row| largest(row) < 200.0),
            "what is kept of a row and of an embedding has grown",
        ),
        Claim::new(
            "Those of Qwen1.5-MoE take the most",
            [mixtral, phi].iter().all(|other| table.at_least(qwen, other, 0.0)),
            "a row keeps its 32 most probable experts at the most, and there are fewer layers",
        ),
    ];
    Ok(vec![table])
}
