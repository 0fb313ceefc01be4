//! NVIDIA GPUs through the driver, which is loaded at run time: the same program runs where there
//! is none. The only user of cudarc.
//!
//! cudarc panics where the library or one of its functions is missing, so both are asked for first
//! ([`library::present`]). Kernels are the PTX of `kernels/ptx`, which the driver compiles for the
//! GPU it finds, and keeps.

mod device;
mod library;
mod ptx;

pub use ptx::{MODULES, Module, text as ptx_text};

use super::gpu::Device;
use crate::{Error, Result};
use cudarc::driver::{DriverError, result, sys};
use device::Cuda;
use library::{Live, failed};
use std::sync::Arc;

/// The oldest architecture that the kernels are compiled for: Turing.
const COMPUTE_MIN: (u32, u32) = (7, 5);

/// Whether there is a driver at all, of whatever age.
pub fn has_driver() -> bool {
    library::is_there()
}

/// The driver's devices that can run the kernels, each opened when it is first used; a sentence
/// where there is no driver, where it is too old, or where none of its devices can.
pub fn devices() -> Result<Vec<Device>> {
    let driver = library::present()?;
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(no_gpu()),
        done => done.map_err(|e| failed("the NVIDIA driver does not start", e))?,
    }
    let n = result::device::get_count().map_err(|e| failed("counting GPUs", e))?;
    let live = Arc::new(Live::default());
    let mut devices: Vec<Device> = Vec::new();
    let mut refused = Vec::new();
    for index in 0..n {
        let cuda = Cuda::find(index, driver, live.clone())?;
        let info = super::gpu::Gpu::info(&cuda);
        if info.compute < COMPUTE_MIN {
            let (major, minor) = info.compute;
            refused.push(format!("{} (compute capability {major}.{minor})", info.name));
        } else {
            devices.push(Arc::new(cuda));
        }
    }
    match (devices.is_empty(), refused.is_empty()) {
        (false, _) => Ok(devices),
        (true, true) => Err(no_gpu()),
        (true, false) => {
            let ((major, minor), refused) = (COMPUTE_MIN, refused.join(", "));
            let why = format!("no GPU has compute capability {major}.{minor} or more: {refused}");
            Err(Error::Device(why))
        }
    }
}

fn no_gpu() -> Error {
    Error::Device("the NVIDIA driver is installed, but it finds no GPU".into())
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
