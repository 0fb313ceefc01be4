//! Small tables: Markdown for people, CSV for programs.

use std::fmt::{Arguments, Write};

/// A table with a title and a paragraph that says what it was made from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    pub title: String,
    pub setting: String,
    /// Column names. The first is the heading of the rows' names.
    pub columns: Vec<String>,
    pub rows: Vec<Row>,
}

impl Table {
    /// A section: heading, setting, grid.
    pub fn markdown(&self) -> String {
        let mut out = format!("### {}\n\n{}\n\n", self.title, self.setting);
        write_grid(&mut out, &self.columns, &self.rows);
        out
    }

    pub fn csv(&self) -> String {
        let mut out = String::from(CSV_HEADER);
        write_csv(&mut out, "moeba", &self.columns, &self.rows);
        out
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    pub name: String,
    pub cells: Vec<Cell>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// A part of 1, printed in percent.
    Share(f64),
    /// Printed with so many decimals.
    Number(f64, usize),
    Text(String),
    Missing,
}

impl Cell {
    /// The value for a plot or a comparison.
    pub fn value(&self) -> Option<f64> {
        match self {
            Cell::Share(x) => Some(100.0 * x),
            Cell::Number(x, _) => Some(*x),
            Cell::Text(_) | Cell::Missing => None,
        }
        .filter(|x| x.is_finite())
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Cell::Share(x) if x.is_finite() => write!(f, "{:.1} %", 100.0 * x),
            Cell::Number(x, decimals) if x.is_finite() => write!(f, "{x:.decimals$}"),
            Cell::Text(text) => f.write_str(text),
            Cell::Share(_) | Cell::Number(..) | Cell::Missing => f.write_str("—"),
        }
    }
}

impl Row {
    pub fn new(name: impl Into<String>, cells: impl IntoIterator<Item = Cell>) -> Row {
        Row { name: name.into(), cells: cells.into_iter().collect() }
    }

    pub fn shares(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Row {
        Row::new(name, values.into_iter().map(Cell::Share))
    }

    pub fn numbers(
        name: impl Into<String>,
        decimals: usize,
        values: impl IntoIterator<Item = f64>,
    ) -> Row {
        Row::new(name, values.into_iter().map(|x| Cell::Number(x, decimals)))
    }
}

/// Column names: those of the rows' names first.
pub fn columns<T: ToString>(first: &str, rest: impl IntoIterator<Item = T>) -> Vec<String> {
    std::iter::once(first.to_string()).chain(rest.into_iter().map(|c| c.to_string())).collect()
}

/// Appends a Markdown table.
pub fn write_grid(out: &mut String, columns: &[String], rows: &[Row]) {
    line(out, format_args!("| {} |", columns.join(" | ")));
    let rule: Vec<&str> =
        columns.iter().enumerate().map(|(i, _)| if i == 0 { "---" } else { "---:" }).collect();
    line(out, format_args!("| {} |", rule.join(" | ")));
    for row in rows {
        let cells: Vec<String> = row.cells.iter().map(Cell::to_string).collect();
        line(out, format_args!("| {} | {} |", row.name, cells.join(" | ")));
    }
    out.push('\n');
}

/// The first line of a CSV file that `write_csv` fills.
pub const CSV_HEADER: &str = "source,row,column,value\n";

/// Appends one line for each cell: source, row, column, value. Numbers are plain: a column named
/// `10 %` is 10.
pub fn write_csv(out: &mut String, source: &str, columns: &[String], rows: &[Row]) {
    for row in rows {
        for (column, cell) in columns.iter().skip(1).zip(&row.cells) {
            let value = match cell {
                Cell::Share(x) | Cell::Number(x, _) if x.is_finite() => x.to_string(),
                Cell::Text(text) => quoted(text),
                _ => String::new(),
            };
            let (row, column) = (quoted(plain(&row.name)), quoted(plain(column)));
            line(out, format_args!("{source},{row},{column},{value}"));
        }
    }
}

fn line(out: &mut String, text: Arguments) {
    writeln!(out, "{text}").expect("a string takes everything");
}

/// A name that is a number, without its percent sign.
fn plain(name: &str) -> &str {
    match name.strip_suffix(" %") {
        Some(number) if number.parse::<f64>().is_ok() => number,
        _ => name,
    }
}

fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        Table {
            title: "Some table".into(),
            setting: "Made up.".into(),
            columns: columns("policy", ["10 %", "20"]),
            rows: vec![
                Row::shares("a, b", [0.5, 0.25]),
                Row::new("c", [Cell::Number(1.0, 2), Cell::Missing]),
            ],
        }
    }

    #[test]
    fn markdown_is_for_people() {
        let expected = "### Some table\n\nMade up.\n\n| policy | 10 % | 20 |\n\
                        | --- | ---: | ---: |\n| a, b | 50.0 % | 25.0 % |\n| c | 1.00 | — |\n\n";
        assert_eq!(table().markdown(), expected);
    }

    #[test]
    fn every_cell_is_a_line_of_csv() {
        let expected = "source,row,column,value\nmoeba,\"a, b\",10,0.5\nmoeba,\"a, b\",20,0.25\n\
                        moeba,c,10,1\nmoeba,c,20,\n";
        assert_eq!(table().csv(), expected);
    }
}
