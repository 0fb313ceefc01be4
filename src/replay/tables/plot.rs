//! Tables as line plots.

use super::Table;
use plotters::prelude::*;

const SIZE: (u32, u32) = (720, 420);
const COLOURS: &[RGBColor] = &[
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xd6, 0x27, 0x28),
    RGBColor(0x2c, 0xa0, 0x2c),
    RGBColor(0x94, 0x67, 0xbd),
    RGBColor(0xff, 0x7f, 0x0e),
    RGBColor(0x17, 0xbe, 0xcf),
    RGBColor(0x8c, 0x56, 0x4b),
    RGBColor(0x7f, 0x7f, 0x7f),
];

type Fault = Box<dyn std::error::Error>;

/// A row a line over the columns; `None` where the table is not to be plotted or has no values.
pub fn svg(table: &Table) -> Option<String> {
    table.plot.as_ref()?;
    let series = series(table);
    let all = || series.iter().flat_map(|(_, points)| points.iter().copied());
    let span = |values: &mut dyn Iterator<Item = f64>| {
        let (low, high) =
            values.fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)));
        (low <= high).then_some((low, high))
    };
    let (x_low, x_high) = span(&mut all().map(|p| p.0))?;
    let (_, y_high) = span(&mut all().map(|p| p.1))?;
    let x = x_low..x_high.max(x_low + f64::EPSILON);
    let y = 0.0..(y_high * 1.05).max(f64::EPSILON);
    let mut out = String::new();
    // Drawing into a string fails only where a label is malformed, and these are ours.
    draw(table, &series, x, y, &mut out).expect("a plot in memory");
    Some(out)
}

type Series = Vec<(String, Vec<(f64, f64)>)>;

fn series(table: &Table) -> Series {
    let xs: Vec<Option<f64>> = table.columns[1..].iter().map(|name| number(name)).collect();
    let points = |cells: &[super::Cell]| {
        let points = xs.iter().zip(cells).filter_map(|(x, cell)| Some(((*x)?, cell.value()?)));
        points.collect::<Vec<_>>()
    };
    let rows = table.rows.iter().map(|row| (row.name.clone(), points(&row.cells)));
    rows.filter(|(_, points)| !points.is_empty()).collect()
}

/// The number that a column's name begins with.
fn number(name: &str) -> Option<f64> {
    name.split_whitespace().next()?.trim_end_matches('%').parse().ok()
}

fn draw(
    table: &Table,
    series: &Series,
    x: std::ops::Range<f64>,
    y: std::ops::Range<f64>,
    out: &mut String,
) -> Result<(), Fault> {
    let axes = table.plot.as_ref().ok_or("no axes")?;
    let root = SVGBackend::with_string(out, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(&table.title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(x, y)?;
    chart.configure_mesh().x_desc(&axes.x).y_desc(&axes.y).light_line_style(WHITE).draw()?;
    for (i, (name, points)) in series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let dots = points.iter().map(|p| Circle::new(*p, 3, colour.filled()));
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
        chart.draw_series(dots)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Axes, Row, columns};
    use super::*;

    #[test]
    fn each_row_is_a_line_and_repeats_exactly() {
        let mut table = Table {
            id: "t",
            title: "T".into(),
            columns: columns("policy", ["10 %", "20 %"]),
            rows: vec![Row::shares("first", [0.5, 0.25]), Row::shares("second", [0.1, f64::NAN])],
            plot: Some(Axes { x: "budget".into(), y: "hits".into() }),
            ..Table::default()
        };
        let plot = svg(&table).unwrap();
        for word in ["<svg", "first", "second", "budget", "hits"] {
            assert!(plot.contains(word), "{word}");
        }
        assert_eq!(svg(&table).unwrap(), plot);
        table.rows.clear();
        assert_eq!(svg(&table), None);
        table.plot = None;
        assert_eq!(svg(&table), None);
    }
}
