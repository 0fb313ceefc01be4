//! NVIDIA GPUs through the driver, which is loaded at run time: the same program runs without one.
//! The only user of cudarc.
//!
//! cudarc panics if the library or one of its functions is missing, so `library::present` checks
//! both first. The kernels are those of `kernels/ptx`: machine code for the GPUs that the compilers
//! there know, and PTX that the driver compiles for others and caches.

mod device;
mod library;
mod modules;
mod ptx;
mod waits;

pub use ptx::{Cubin, MODULES, Module, text as ptx_text};

use super::gpu::host_waits::HostWaits;
use super::gpu::{Device, Version};
use crate::{Error, Result};
use cudarc::driver::{DriverError, result, sys};
use device::Cuda;
use library::{Live, failed};
use std::sync::Arc;

/// The oldest architecture that the kernels are compiled for: Turing.
const COMPUTE_MIN: Version = Version::new(7, 5);

/// Whether a driver is installed, of any version.
pub fn has_driver() -> bool {
    library::is_there()
}

/// The driver's devices that can run the kernels. Each is opened when it is first used. It is an
/// error if there is no driver, if it is too old, or if none of its devices can run them.
pub fn devices() -> Result<Vec<Device>> {
    let driver = library::present()?;
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(no_gpu()),
        done => done.map_err(|e| failed("the NVIDIA driver does not start", e))?,
    }
    let n = result::device::get_count().map_err(|e| failed("counting GPUs", e))?;
    let (live, waits) = (Arc::new(Live::default()), Arc::new(HostWaits::default()));
    let mut devices: Vec<Device> = Vec::new();
    let mut refused = Vec::new();
    for index in 0..n {
        let cuda = Cuda::find(index, driver, live.clone(), waits.clone())?;
        let info = super::gpu::Gpu::info(&cuda);
        if info.compute < COMPUTE_MIN {
            refused.push(format!("{} (compute capability {})", info.name, info.compute));
        } else {
            devices.push(Arc::new(cuda));
        }
    }
    match (devices.is_empty(), refused.is_empty()) {
        (false, _) => Ok(devices),
        (true, true) => Err(no_gpu()),
        (true, false) => {
            let refused = refused.join(", ");
            let why = format!("no GPU has compute capability {COMPUTE_MIN} or more: {refused}");
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
