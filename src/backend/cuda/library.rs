//! The driver's library: checks that it is installed, new enough and complete, and words its
//! errors.

use crate::backend::gpu::Version;
use crate::{Error, Result};
use cudarc::driver::{DriverError, sys};
use std::collections::HashSet;
use std::ffi::{CStr, c_int};
use std::sync::RwLock;

/// CUDA 12.0 (driver 525), the toolkit that the PTX comes from.
const VERSION_MIN: Version = Version::new(12, 0);

/// The functions that tell the driver's version, which explains more than a missing function does.
const VERSION_FUNCTIONS: &[&CStr] =
    &[c"cuDriverGetVersion", c"cuGetErrorName", c"cuGetErrorString"];

/// All other functions that are called, by the names that cudarc loads them under: it panics if one
/// is missing.
const FUNCTIONS: &[&CStr] = &[
    c"cuInit",
    c"cuDeviceGet",
    c"cuDeviceGetCount",
    c"cuDeviceGetName",
    c"cuDeviceGetAttribute",
    c"cuDeviceTotalMem_v2",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuCtxSetCurrent",
    c"cuCtxSynchronize",
    c"cuCtxGetStreamPriorityRange",
    c"cuMemGetInfo_v2",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemHostAlloc",
    c"cuMemFreeHost",
    c"cuMemHostGetDevicePointer_v2",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyAsync",
    c"cuMemsetD8Async",
    c"cuStreamCreateWithPriority",
    c"cuStreamDestroy_v2",
    c"cuStreamWaitEvent",
    c"cuStreamWaitValue32_v2",
    c"cuStreamWriteValue32_v2",
    c"cuStreamQuery",
    c"cuStreamSynchronize",
    c"cuStreamBeginCapture_v2",
    c"cuStreamEndCapture",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuEventQuery",
    c"cuEventSynchronize",
    c"cuEventElapsedTime",
    c"cuModuleLoadData",
    c"cuModuleUnload",
    c"cuModuleGetFunction",
    c"cuFuncGetAttribute",
    c"cuFuncSetAttribute",
    c"cuLaunchKernel",
    c"cuGraphInstantiateWithFlags",
    c"cuGraphUpload",
    c"cuGraphLaunch",
    c"cuGraphExecDestroy",
    c"cuGraphDestroy",
];

pub fn is_there() -> bool {
    // SAFETY: loads the library and lets it go; the driver's library may be loaded anywhere.
    unsafe { sys::is_culib_present() }
}

/// The driver's CUDA version, if it is new enough and complete.
pub fn present() -> Result<Version> {
    if !is_there() {
        return Err(Error::Device("there is no NVIDIA driver (libcuda was not found)".into()));
    }
    let version = version()?;
    if version < VERSION_MIN {
        return Err(Error::Device(format!(
            "the NVIDIA driver is too old: it supports CUDA {version}, and the kernels need \
             {VERSION_MIN} (driver 525 or newer)"
        )));
    }
    if let Some(name) = FUNCTIONS.iter().find(|name| !has(name)) {
        let name = name.to_string_lossy();
        return Err(Error::Device(format!(
            "the NVIDIA driver cannot be used: it supports CUDA {version}, but lacks {name}"
        )));
    }
    Ok(version)
}

/// Whether the library, which is there, has a function.
fn has(name: &CStr) -> bool {
    // SAFETY: the library is there, so `culib` does not panic; the function is only asked for, not
    // called.
    unsafe { sys::culib().get::<*const ()>(name.to_bytes_with_nul()).is_ok() }
}

/// The newest CUDA that the driver supports.
fn version() -> Result<Version> {
    if let Some(name) = VERSION_FUNCTIONS.iter().find(|name| !has(name)) {
        let name = name.to_string_lossy();
        return Err(Error::Device(format!("the NVIDIA driver cannot be used: it has no {name}")));
    }
    let mut version: c_int = 0;
    // SAFETY: the function is there and writes one number.
    let got = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
    got.map_err(|e| failed("asking the NVIDIA driver for its version", e))?;
    // 12040 is 12.4.
    Ok(Version::new(version as u32 / 1000, version as u32 % 1000 / 10))
}

/// "copying to GPU 0 (NVIDIA L4): out of memory (CUDA_ERROR_OUT_OF_MEMORY)"
pub fn failed(what: impl std::fmt::Display, error: DriverError) -> Error {
    let text = |text: std::result::Result<&CStr, DriverError>| {
        text.map_or("unknown error".into(), |text| text.to_string_lossy().into_owned())
    };
    let (says, name) = (text(error.error_string()), text(error.error_name()));
    Error::Device(format!("{what}: {says} ({name})"))
}

/// The handles of all devices that were made and not yet destroyed. A call with any other handle
/// never reaches the driver.
#[derive(Default)]
pub struct Live(RwLock<HashSet<(Kind, u64)>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Memory,
    Pinned,
    Registered,
    Stream,
    Event,
    Graph,
}

impl Live {
    pub fn add(&self, kind: Kind, handle: u64) {
        self.0.write().unwrap_or_else(|e| e.into_inner()).insert((kind, handle));
    }

    /// # Panics
    /// If it is not among them, which would be our bug.
    pub fn check(&self, kind: Kind, handle: u64) {
        let live = self.0.read().unwrap_or_else(|e| e.into_inner());
        assert!(live.contains(&(kind, handle)), "{kind:?} {handle:#x} does not exist");
    }

    /// # Panics
    /// As `check`.
    pub fn remove(&self, kind: Kind, handle: u64) {
        let removed = self.0.write().unwrap_or_else(|e| e.into_inner()).remove(&(kind, handle));
        assert!(removed, "{kind:?} {handle:#x} does not exist");
    }
}
