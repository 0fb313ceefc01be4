//! Tables as Markdown for people and as CSV for programs.

use super::Table;
use moeba::trace::table::{CSV_HEADER, write_csv, write_grid};

/// A section of a document: heading, setting, our figures, the paper's, the claims.
pub fn markdown(table: &Table, plot_folder: &str) -> String {
    let mut out = format!("### {}\n\n", table.title);
    paragraph(&mut out, &table.setting);
    write_grid(&mut out, &table.columns, &table.rows);
    if let Some(paper) = &table.paper {
        paragraph(&mut out, &format!("The paper's: {}", paper.setting));
        write_grid(&mut out, &paper.columns, &paper.rows);
    }
    for claim in &table.claims {
        out.push_str(&claim.markdown());
    }
    if !table.claims.is_empty() {
        out.push('\n');
    }
    if table.plot.is_some() {
        line(&mut out, &format!("![{}]({plot_folder}/{}.svg)\n", table.title, table.id));
    }
    out
}

fn line(out: &mut String, text: &str) {
    out.push_str(text);
    out.push('\n');
}

fn paragraph(out: &mut String, text: &str) {
    line(out, text);
    out.push('\n');
}

/// One line a cell: row, column, value. Ours, then the paper's. Numbers are plain: `10 %` as the
/// name of a column is 10.
pub fn csv(table: &Table) -> String {
    let mut out = String::from(CSV_HEADER);
    write_csv(&mut out, "moeba", &table.columns, &table.rows);
    if let Some(paper) = &table.paper {
        write_csv(&mut out, "paper", &paper.columns, &paper.rows);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::{Axes, Cell, Change, Paper, Row, Runs, check, columns};
    use super::*;

    fn table() -> Table {
        let mut table = Table {
            id: "some-table",
            title: "Some table".into(),
            setting: "Made up.".into(),
            columns: columns("policy", [10, 20]),
            rows: vec![
                Row::shares("a, b", [0.5, 0.25]),
                Row::new("c", [Cell::Number(1.0, 2), Cell::Missing]),
            ],
            paper: Some(Paper {
                columns: columns("policy", ["x"]),
                rows: vec![Row::shares("a", [0.1])],
                setting: "elsewhere.".into(),
            }),
            claims: Vec::new(),
            plot: Some(Axes { x: "size".into(), y: "hits".into() }),
        };
        let make = |_: &[Change]| Ok(Table::default());
        let runs = Runs::new(&make);
        let more = check("More is more", &table, &runs, |t| t.compare("a, b", "c", 0.0)).done();
        let less = check("Less is more", &table, &runs, |t| t.compare("c", "a, b", 0.0)).done();
        table.claims = vec![more, less];
        table
    }

    #[test]
    fn a_section_has_both_tables_and_all_claims() {
        let expected = "### Some table\n\nMade up.\n\n| policy | 10 | 20 |\n| --- | ---: | ---: |\n\
                        | a, b | 50.0 % | 25.0 % |\n| c | 1.00 | — |\n\nThe paper's: elsewhere.\n\n\
                        | policy | x |\n| --- | ---: |\n| a | 10.0 % |\n\n- More is more — agrees\n\
                        - Less is more — **differs**: c 1.00 and a, b 50.0 % at 10\n\
                        \x20 - the whole of the difference is explained by none of these runs\n\n\
                        ![Some table](plots/some-table.svg)\n\n";
        assert_eq!(markdown(&table(), "plots"), expected);
    }

    #[test]
    fn every_cell_is_a_line_of_csv() {
        let expected = "source,row,column,value\nmoeba,\"a, b\",10,0.5\nmoeba,\"a, b\",20,0.25\n\
                        moeba,c,10,1\nmoeba,c,20,\npaper,a,x,0.1\n";
        assert_eq!(csv(&table()), expected);
    }

    #[test]
    fn rows_are_compared_where_both_have_values() {
        let table = table();
        assert!(table.at_least("a, b", "c", 0.0));
        assert!(!table.at_least("c", "a, b", 10.0));
        assert!(table.at_least("c", "a, b", 49.0));
    }
}
