//! Compares every kernel of a device with its twin on the CPU, on seeded data, for `moeba
//! selftest`. Each family of kernels has a file here and a line in `FAMILIES`.
//!
//! A case is a shape and a seed. Its operands are `Mirror`s, values on the host and on the
//! device: the twin changes the one half, the kernel the other, and `Bench::equal` compares them.
//!
//! The twins use this processor's vector code, which the project's tests compare with the scalar
//! code, the specification, to the bit.

mod activate;
mod attention;
mod attention_inputs;
mod bench;
mod block_keys;
mod compress;
mod conv;
#[doc(hidden)] // tests use its numbers
pub mod data;
mod delta;
mod embed;
mod expert;
mod group;
mod halves;
mod heads;
mod index;
mod latent;
mod machinery;
mod norm;
mod operands;
mod products;
mod quantize;
mod report;
mod rope;
mod router;
mod rows;
mod sample;
mod scan;
mod slots;
mod streams;

pub use bench::Extent;
pub use report::{Outcome, Report, Row};

use crate::Result;
use crate::backend::gpu::Device;
use bench::{Bench, Mirror, try_map};
use data::Random;

/// The checks of one family; an error if its kernels cannot be loaded.
type Family = fn(&Bench) -> Result<()>;

const FAMILIES: &[(&str, Family)] = &[
    ("quantize", quantize::check),
    ("products", products::check),
    ("halves", halves::check),
    ("heads", heads::check),
    ("embed", embed::check),
    ("norm", norm::check),
    ("rope", rope::check),
    ("rows", rows::check),
    ("activate", activate::check),
    ("attention", attention::check),
    ("compress", compress::check),
    ("latent", latent::check),
    ("index", index::check),
    ("block keys", block_keys::check),
    ("attention inputs", attention_inputs::check),
    ("conv", conv::check),
    ("delta", delta::check),
    ("kda", delta::check_kda),
    ("scan", scan::check),
    ("router", router::check),
    ("slots", slots::check),
    ("group", group::check),
    ("expert", expert::check),
    ("streams", streams::check),
    ("sample", sample::check),
];

/// Checks of what a device does besides computing: graphs, streams that wait, copies beside
/// kernels.
pub fn machinery(device: &Device, extent: Extent) -> Result<Report> {
    let bench = Bench::new(device, extent)?;
    machinery::check(&bench)?;
    Ok(bench.into_report())
}

/// Runs all families on the device. `on_family` is called with the name of each before it runs; its
/// error ends the run.
pub fn run(
    device: &Device,
    extent: Extent,
    on_family: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Report> {
    let bench = Bench::new(device, extent)?;
    for (name, family) in FAMILIES {
        on_family(name)?;
        if let Err(error) = family(&bench) {
            bench.failed(name, &error);
        }
    }
    Ok(bench.into_report())
}
