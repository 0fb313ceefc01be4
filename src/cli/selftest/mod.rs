//! `moeba selftest`: every kernel of a GPU against its twin on the CPU, and with `--deep` all that
//! a GPU does besides. For those whose answers look wrong, and for new kinds of GPU.

mod whole_model;

use super::out;
use crate::backend::selftest;
use crate::backend::selftest::{Extent, Outcome, Report, Row};
use crate::engine::DeviceChoice;
use crate::engine::device;
use crate::{Error, Result, interrupt};

#[derive(clap::Args, Debug)]
pub struct Args {
    /// Devices to test: auto for all GPUs, cuda, cuda:N or cuda:0,1
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "MOEBA_DEVICE")]
    device: DeviceChoice,
    /// Test small shapes only
    #[arg(long)]
    quick: bool,
    /// Also test graphs, waits and copies, and a whole random model
    #[arg(long)]
    deep: bool,
}

pub fn run(args: Args) -> Result<()> {
    if args.device == DeviceChoice::Cpu {
        let why = "--device cpu: the CPU is the reference that GPUs are tested against";
        return Err(Error::Usage(why.into()));
    }
    let devices = device::open(&args.device)?;
    if devices.is_empty() {
        let why = "there is no usable GPU to test";
        return Err(Error::Device(why.into()));
    }
    let extent = if args.quick { Extent::Quick } else { Extent::Full };
    let mut n_bad = 0;
    for device in &devices {
        let name = device::name(device.info());
        out::line(&name)?;
        let report = selftest::run(device, extent, &mut |family| {
            log::debug!("{family}");
            interrupt::check()
        })?;
        n_bad += show(&report)?;
        if args.deep {
            n_bad += show(&selftest::machinery(device, extent)?)?;
        }
    }
    if args.deep {
        drop(devices);
        n_bad += show(&whole_model::check(&args.device)?)?;
    }
    match n_bad {
        0 => Ok(()),
        n => {
            Err(Error::Device(format!("{n} checks failed: results of this device would be wrong")))
        }
    }
}

/// Prints a report. Returns the number of failures.
fn show(report: &Report) -> Result<usize> {
    out::line(&text(report))?;
    Ok(report.rows.iter().filter(|row| !row.outcome.is_good()).count())
}

/// A line a check, and their number.
fn text(report: &Report) -> String {
    let mut lines = vec![line("kernel", "format", "shapes", "result")];
    lines.extend(report.rows.iter().map(|row| {
        let Row { kernel, format, shapes, outcome } = row;
        line(kernel, format, &shapes.len().to_string(), &result(outcome, shapes))
    }));
    let n_good = report.rows.iter().filter(|row| row.outcome.is_good()).count();
    lines.push(format!("{n_good} of {} match the CPU", report.rows.len()));
    lines.join("\n")
}

fn line(kernel: &str, format: &str, shapes: &str, result: &str) -> String {
    format!("{kernel:<20} {format:<11} {shapes:>6}  {result}").trim_end().to_owned()
}

/// The outcome and the largest shape.
fn result(outcome: &Outcome, shapes: &[String]) -> String {
    let last = shapes.last().map_or("", String::as_str);
    match outcome {
        Outcome::Equal => format!("equal bits, up to {last}"),
        Outcome::Within { error, bound } => {
            format!("off by {error:.1e} of {bound:.1e}, up to {last}")
        }
        Outcome::Differs(what) => format!("DIFFERS at {what}"),
        Outcome::Failed(why) => format!("FAILED: {why}"),
        Outcome::LeftOut(why) => format!("left out: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_says_how_each_kernel_came_out() {
        let row = |kernel: &str, format: &str, outcome| Row {
            kernel: kernel.into(),
            format: format.into(),
            shapes: vec!["1×8".into(), "3×5".into()],
            outcome,
        };
        let rows = vec![
            row("matvec", "Q4_K", Outcome::Equal),
            row("attention_prompt", "F16", Outcome::Within { error: 1.5e-7, bound: 1e-6 }),
            row("embed", "Q8_0", Outcome::Differs("3×5: 1 of 15, first 2 for 1 at 4".into())),
            row("rope", "", Outcome::Failed("the GPU is lost".into())),
        ];
        let expected = "\
kernel               format      shapes  result
matvec               Q4_K             2  equal bits, up to 3×5
attention_prompt     F16              2  off by 1.5e-7 of 1.0e-6, up to 3×5
embed                Q8_0             2  DIFFERS at 3×5: 1 of 15, first 2 for 1 at 4
rope                                  2  FAILED: the GPU is lost
2 of 4 match the CPU";
        assert_eq!(text(&Report { rows }), expected);
    }
}
