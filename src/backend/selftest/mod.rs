//! Every kernel of a device against its twin on the CPU, on seeded data: what `moeba selftest`
//! prints. A family of kernels is a file here and a line of [`FAMILIES`].
//!
//! The twins run with this processor's vector code, which the project's own tests hold to the bits
//! of the scalar code, the specification.

mod activate;
mod attention;
mod bench;
#[doc(hidden)] // its numbers are those of tests too
pub mod data;
mod delta;
mod embed;
mod expert;
mod heads;
mod norm;
mod products;
mod quantize;
mod report;
mod rope;
mod router;
mod rows;
mod sample;
mod slots;

pub use report::{Outcome, Report, Row};

use crate::Result;
use crate::backend::gpu::Device;
use bench::Bench;

/// Checks of one family: what cannot even be loaded is an error.
type Family = fn(&Bench, &mut Report) -> Result<()>;

const FAMILIES: &[(&str, Family)] = &[
    ("quantize", quantize::check),
    ("products", products::check),
    ("heads", heads::check),
    ("embed", embed::check),
    ("norm", norm::check),
    ("rope", rope::check),
    ("rows", rows::check),
    ("activate", activate::check),
    ("attention", attention::check),
    ("delta", delta::check),
    ("router", router::check),
    ("slots", slots::check),
    ("expert", expert::check),
    ("sample", sample::check),
];

/// How much is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// A small shape or two of everything: seconds on an emulated device.
    Quick,
    /// Sizes that fill no block, no warp and no tile, too: the project's own tests.
    Odd,
    /// Shapes of real models besides.
    Full,
}

/// Runs all families on the device; `on_family` hears the name of each as it begins, and may end
/// it all.
pub fn run(
    device: &Device,
    extent: Extent,
    on_family: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Report> {
    let bench = Bench::new(device, extent)?;
    let mut report = Report::default();
    for (name, family) in FAMILIES {
        on_family(name)?;
        if let Err(error) = family(&bench, &mut report) {
            report.failed(name, &error);
        }
    }
    Ok(report)
}
