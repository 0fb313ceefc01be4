//! Tables as line plots.

use crate::tables::Table;
use plotters::prelude::*;

/// With the legend's part at the right, which keeps clear of the lines.
const SIZE: (u32, u32) = (960, 420);
const LEGEND_X: i32 = 700;
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
    let points = |cells: &[crate::tables::Cell]| {
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
    let (left, legend) = root.split_horizontally(LEGEND_X);
    let x_span = x.end - x.start;
    let mut chart = ChartBuilder::on(&left)
        .caption(&table.title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(x, y)?;
    let mut mesh = chart.configure_mesh();
    // Batches and layers are whole numbers.
    let is_wide = x_span >= 4.0;
    let label = |x: &f64| match is_wide && x.fract() != 0.0 {
        true => String::new(),
        false => ((x * 100.0).round() / 100.0).to_string(),
    };
    mesh.x_label_formatter(&label).x_desc(&axes.x).y_desc(&axes.y);
    mesh.light_line_style(WHITE).draw()?;
    for (i, (name, points)) in series.iter().enumerate() {
        let style = COLOURS[i % COLOURS.len()].stroke_width(2);
        let in_legend = 24 + 20 * i as i32;
        // Colours come again: the second time lines are dashed and have triangles.
        if i < COLOURS.len() {
            chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
            chart.draw_series(points.iter().map(|p| Circle::new(*p, 3, style.filled())))?;
            legend.draw(&PathElement::new([(8, in_legend), (40, in_legend)], style))?;
            legend.draw(&Circle::new((24, in_legend), 3, style.filled()))?;
        } else {
            chart.draw_series(DashedLineSeries::new(points.iter().copied(), 6, 4, style))?;
            chart.draw_series(points.iter().map(|p| TriangleMarker::new(*p, 5, style.filled())))?;
            for dash in [[(8, in_legend), (16, in_legend)], [(32, in_legend), (40, in_legend)]] {
                legend.draw(&PathElement::new(dash, style))?;
            }
            legend.draw(&TriangleMarker::new((24, in_legend), 5, style.filled()))?;
        }
        legend.draw(&Text::new(name.clone(), (48, in_legend - 6), ("sans-serif", 12)))?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::{Axes, Row, columns};

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
        // More rows than colours: the ninth has the first one's, and is dashed.
        table.rows = (0..9).map(|i| Row::shares(format!("row {i}"), [0.1, 0.2])).collect();
        let many = svg(&table).unwrap();
        let n_lines = |text: &str| text.matches("<polyline").count();
        assert!(n_lines(&many) > 2 * 9 && many.contains("<polygon"), "{many}");
        table.rows.clear();
        assert_eq!(svg(&table), None);
        table.plot = None;
        assert_eq!(svg(&table), None);
    }
}
