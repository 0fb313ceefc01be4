//! NVIDIA GPUs through the driver, which is loaded at run time: the same program runs where there
//! is none. The only user of cudarc.
//!
//! cudarc panics where the library or one of its functions is missing, so both are asked for first
//! ([`library::present`]). Kernels are the PTX of `kernels/ptx`, which the driver compiles for the
//! GPU it finds, and keeps.

mod device;
mod library;
mod ptx;

pub use ptx::MODULES;

use super::gpu::Device;
use crate::{Error, Result};
use cudarc::driver::result;
use device::Cuda;
use library::{Live, failed};
use std::sync::Arc;

/// The oldest architecture that the kernels are compiled for: Turing.
const COMPUTE_MIN: (u32, u32) = (7, 5);

/// Whether there is a driver at all, of whatever age.
pub fn has_driver() -> bool {
    library::is_there()
}

/// The driver's devices that can run the kernels; a sentence where there is no driver, where it is
/// too old, or where none of its devices can.
pub fn devices() -> Result<Vec<Device>> {
    let driver = library::present()?;
    result::init().map_err(|e| failed("the NVIDIA driver does not start", e))?;
    let n = result::device::get_count().map_err(|e| failed("counting GPUs", e))?;
    let live = Arc::new(Live::default());
    let mut devices: Vec<Device> = Vec::new();
    let mut refused = Vec::new();
    for index in 0..n {
        let cuda = Cuda::open(index, driver, live.clone())?;
        let info = super::gpu::Gpu::info(&cuda);
        if info.compute < COMPUTE_MIN {
            let (major, minor) = info.compute;
            refused.push(format!("{} (compute capability {major}.{minor})", info.name));
        } else {
            devices.push(Arc::new(cuda));
        }
    }
    if !devices.is_empty() {
        return Ok(devices);
    }
    let (major, minor) = COMPUTE_MIN;
    Err(Error::Device(if refused.is_empty() {
        "the NVIDIA driver is there, but it has no GPU".into()
    } else {
        let refused = refused.join(", ");
        format!("no GPU has compute capability {major}.{minor} or more: {refused}")
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_there_is_a_sentence() {
        match devices() {
            Ok(devices) => assert!(!devices.is_empty()),
            Err(Error::Device(sentence)) => assert!(sentence.len() > 20, "{sentence}"),
            Err(other) => panic!("{other}"),
        }
    }
}
