//! Figure 18: memory of the Expert Map Store.

use super::stated;
use crate::tables::{
    Axes, Cell, Change, Compared, Finding, Inputs, Row, Runs, Table, check, columns,
};
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
    let nothing = |_: &[Change]| Ok(Table::default());
    let runs = Runs::new(&nothing);
    let small = |table: &Table| {
        Finding::strict(table.rows.iter().map(|row| {
            let largest = row.cells.last().and_then(Cell::value).unwrap_or(f64::NAN);
            Compared {
                margin: 200.0 - largest,
                figures: format!("{largest:.0} MB of {}", row.name),
            }
        }))
    };
    let [mixtral, qwen, phi] = MODELS.map(|(name, ..)| name);
    let most = |table: &Table| table.compare(qwen, mixtral, 0.0).and(table.compare(qwen, phi, 0.0));
    let claims = [
        check("32K maps take less than 200 MB", &table, &runs, small).done(),
        check("Those of Qwen1.5-MoE take the most", &table, &runs, most).done(),
    ];
    table.claims = claims.into();
    Ok(vec![table])
}
