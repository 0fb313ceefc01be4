//! CSV with a line for each expert of a layer of a token.

use super::{Choice, Fault, Request, Source, Token};
use std::collections::HashMap;

/// Which column has what.
struct Columns {
    layer: usize,
    expert: usize,
    step: Option<usize>,
    turn: Option<usize>,
    phase: Option<usize>,
    weight: Option<usize>,
}

/// A line.
struct Row {
    line: usize,
    layer: usize,
    expert: u32,
    step: Option<i64>,
    turn: i64,
    is_prompt: bool,
    weight: Option<f32>,
}

/// No model has more layers; a larger number is a column of something else.
const MAX_LAYERS: usize = 10_000;

pub fn read(text: &str, kind: &str) -> Result<Source, Fault> {
    let mut source = Source { unit: "line", ..Source::default() };
    let mut columns = None;
    let mut rows = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line_number = at + 1;
        let line = line.trim_end_matches('\r');
        if let Some(comment) = line.strip_prefix('#') {
            // `# model=… n_layer=… n_expert=…`
            let n = comment.split_whitespace().find_map(|word| word.strip_prefix("n_expert="));
            source.n_experts = n.and_then(|n| n.parse().ok()).or(source.n_experts);
        } else if !line.trim().is_empty() {
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            let columns: &Columns = match &columns {
                Some(columns) => columns,
                None => {
                    let (found, is_header) = header(&fields, line_number)?;
                    let found = columns.insert(found);
                    if is_header {
                        continue;
                    }
                    found
                }
            };
            rows.push(row(&fields, columns, line_number)?);
        }
    }
    let has_steps = rows.first().is_some_and(|row| row.step.is_some());
    source.requests = if has_steps { by_step(&rows, kind) } else { by_layer(&rows, kind)? };
    Ok(source)
}

/// The columns by name, and whether the line names them: without a header, a line is a layer and
/// an expert.
fn header(fields: &[&str], line: usize) -> Result<(Columns, bool), Fault> {
    let find = |names: &[&str]| {
        fields.iter().position(|field| names.iter().any(|name| field.eq_ignore_ascii_case(name)))
    };
    if let &[layer, expert] = fields
        && layer.parse::<usize>().is_ok()
        && expert.parse::<usize>().is_ok()
    {
        let (step, turn, phase, weight) = (None, None, None, None);
        return Ok((Columns { layer: 0, expert: 1, step, turn, phase, weight }, false));
    }
    let (layer, expert) = (find(&["layer"]), find(&["expert", "expert_id", "expert_idx"]));
    let (Some(layer), Some(expert)) = (layer, expert) else {
        let place = format!("line {line}");
        return Err(Fault::new(place, "names of columns with layer and expert", fields.join(",")));
    };
    let columns = Columns {
        layer,
        expert,
        step: find(&["step", "token", "token_pos"]),
        turn: find(&["turn", "request"]),
        phase: find(&["phase"]),
        weight: find(&["weight", "gate_weight"]),
    };
    Ok((columns, true))
}

fn row(fields: &[&str], columns: &Columns, line: usize) -> Result<Row, Fault> {
    let field = |at: usize| {
        let missing = || Fault::new(format!("line {line}"), format!("column {}", at + 1), "none");
        fields.get(at).copied().ok_or_else(missing)
    };
    let fault = |expected: &str, got: &str| Fault::new(format!("line {line}"), expected, got);
    let number = |at: Option<usize>, name: &str| match at {
        None => Ok(None),
        Some(at) => {
            let text = field(at)?;
            text.parse::<i64>().map(Some).map_err(|_| fault(&format!("a number as {name}"), text))
        }
    };
    let layer = field(columns.layer)?;
    let small = layer.parse::<usize>().ok().filter(|layer| *layer < MAX_LAYERS);
    let expert = field(columns.expert)?;
    let is_prompt = match columns.phase.map(field).transpose()? {
        None | Some("1" | "decode" | "generation") => false,
        Some("0" | "prefill" | "prompt") => true,
        Some(other) => return Err(fault("prefill or decode (0 or 1) as phase", other)),
    };
    let weight = columns.weight.map(field).transpose()?;
    Ok(Row {
        line,
        layer: small.ok_or_else(|| fault("a layer", layer))?,
        expert: expert.parse().map_err(|_| fault("an expert", expert))?,
        step: number(columns.step, "step")?,
        turn: number(columns.turn, "turn")?.unwrap_or(0),
        is_prompt,
        weight: weight.and_then(|text| text.parse().ok()),
    })
}

impl Token {
    fn put(&mut self, row: &Row) {
        if self.layers.len() <= row.layer {
            self.layers.resize(row.layer + 1, Choice::default());
        }
        let choice = &mut self.layers[row.layer];
        choice.experts.push(row.expert);
        choice.weights.extend(row.weight);
    }
}

/// Tokens by turn, phase and step, in the order in which they first come. A turn is a request.
fn by_step(rows: &[Row], kind: &str) -> Vec<Request> {
    let mut requests: Vec<Request> = Vec::new();
    let mut turns = HashMap::new();
    let mut places = HashMap::new();
    for row in rows {
        let request = *turns.entry(row.turn).or_insert_with(|| {
            requests.push(Request { kind: kind.into(), tokens: Vec::new() });
            requests.len() - 1
        });
        let tokens = &mut requests[request].tokens;
        let at = *places.entry((row.turn, row.is_prompt, row.step)).or_insert_with(|| {
            let (place, is_prompt) = (row.line, row.is_prompt);
            tokens.push(Token { place, is_prompt, ..Token::default() });
            tokens.len() - 1
        });
        tokens[at].put(row);
    }
    requests
}

/// Tokens by their layers: a pass ends where the next line's layer is not behind the last one's.
/// The shortest run of lines of one layer is a decoded token's experts, k; a pass with longer runs
/// is a prompt's. Where a prompt's last layer computes the last tokens alone, it has fewer.
fn by_layer(rows: &[Row], kind: &str) -> Result<Vec<Request>, Fault> {
    let runs: Vec<&[Row]> = rows.chunk_by(|a, b| a.layer == b.layer).collect();
    let Some(k) = runs.iter().map(|run| run.len()).min() else { return Ok(Vec::new()) };
    if runs.len() == 1 {
        let place = format!("line {}", rows[0].line);
        return Err(Fault::new(place, "several layers, or a column step or token", "one layer"));
    }
    let mut tokens = Vec::new();
    for pass in runs.chunk_by(|a, b| a[0].layer < b[0].layer) {
        let n = pass.iter().map(|run| run.len() / k).max().unwrap_or(0);
        let new = |at: usize| Token {
            place: pass[0][(at * k).min(pass[0].len() - 1)].line,
            is_prompt: n > 1,
            ..Token::default()
        };
        let first = tokens.len();
        tokens.extend((0..n).map(new));
        for run in pass {
            if run.len() % k != 0 {
                let place = format!("line {}", run[0].line);
                let expected = format!("{k} experts for each token of a layer");
                return Err(Fault::new(place, expected, run.len()));
            }
            let skipped = n - run.len() / k;
            for (at, row) in run.iter().enumerate() {
                tokens[first + skipped + at / k].put(row);
            }
        }
    }
    Ok(vec![Request { kind: kind.into(), tokens }])
}
