//! kernels/shim/abi.h in Rust.

use crate::backend::gpu::Grid;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The beginning of `ShimKernel`
#[repr(C)]
struct RawKernel {
    name: *const c_char,
    params: *const c_char,
    params_size: u32,
}

/// A kernel of the shim's list, which lives as long as the program.
#[derive(Clone, Copy, Debug)]
pub struct ShimKernel(*const RawKernel);

// SAFETY: it points to what does not change after the start of the program.
unsafe impl Send for ShimKernel {}
// SAFETY: as above.
unsafe impl Sync for ShimKernel {}

/// `ShimAllocation`
#[derive(Clone, Debug)]
#[repr(C)]
pub struct ShimAllocation {
    pub address: u64,
    pub size: u64,
    pub bytes: *mut u8,
    pub shadow: *mut u8,
    pub touched_low: u64,
    pub touched_high: u64,
}

/// Bits of a shadow's byte.
pub const WRITTEN: u8 = 1;
pub const READ_NOW: u8 = 2;
pub const WRITTEN_NOW: u8 = 4;

impl ShimAllocation {
    pub fn touched(&self) -> Range<usize> {
        self.touched_low as usize..(self.touched_high as usize).max(self.touched_low as usize)
    }
}

/// `ShimLaunch`
#[repr(C)]
struct RawLaunch {
    kernel: *const RawKernel,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared_bytes: u32,
    shared_limit: u32,
    seed: u32,
    params_size: u32,
    params: *const u8,
    allocations: *mut ShimAllocation,
    n_allocations: u64,
    error: *mut c_char,
    error_size: u64,
}

pub struct ShimLaunch<'a> {
    pub kernel: ShimKernel,
    pub grid: Grid,
    pub shared_limit: u32,
    pub seed: u32,
    /// The kernel's parameters.
    pub params: &'a [u64],
}

mod linked {
    use super::*;

    unsafe extern "C" {
        pub fn shim_find(name: *const c_char) -> *const RawKernel;
        pub fn shim_name(n: u32) -> *const c_char;
        pub fn shim_launch(launch: *const RawLaunch) -> i32;
    }
}

pub fn find(name: &str) -> Option<ShimKernel> {
    let name = CString::new(name).ok()?;
    // SAFETY: a string that ends with a zero.
    let kernel = unsafe { linked::shim_find(name.as_ptr()) };
    (!kernel.is_null()).then_some(ShimKernel(kernel))
}

/// The names of all kernels.
pub fn names() -> Vec<String> {
    // SAFETY: the function answers null past the end, and constant strings before.
    let name = |n| unsafe {
        let name = linked::shim_name(n);
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    };
    (0..).map_while(name).collect()
}

/// The names of the kernels that have run, and how often.
pub fn launched() -> MutexGuard<'static, BTreeMap<&'static str, usize>> {
    static LAUNCHED: Mutex<BTreeMap<&'static str, usize>> = Mutex::new(BTreeMap::new());
    LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ShimKernel {
    pub fn to_bits(self) -> u64 {
        self.0 as usize as u64
    }

    /// # Safety
    /// `bits` came from `to_bits`.
    pub unsafe fn from_bits(bits: u64) -> ShimKernel {
        ShimKernel(bits as usize as *const RawKernel)
    }

    fn raw(self) -> &'static RawKernel {
        // SAFETY: it points to a kernel of the shim's list, which is static and begins like this.
        unsafe { &*self.0 }
    }

    pub fn name(self) -> &'static str {
        // SAFETY: a string literal of the shim.
        let name = unsafe { CStr::from_ptr(self.raw().name) };
        name.to_str().unwrap_or("?")
    }

    /// The name of the struct of its parameters.
    pub fn params(self) -> &'static str {
        // SAFETY: as above.
        let params = unsafe { CStr::from_ptr(self.raw().params) };
        params.to_str().unwrap_or("?")
    }

    /// That struct's size.
    pub fn params_size(self) -> usize {
        self.raw().params_size as usize
    }
}

/// Runs a launch. The error is a sentence about the rule that it broke.
///
/// # Safety
/// `allocations` are in ascending order, do not overlap, and each has `size` bytes and shadow
/// bytes that nothing else uses.
pub unsafe fn launch(
    launch: &ShimLaunch,
    allocations: &mut [ShimAllocation],
) -> Result<(), String> {
    *launched().entry(launch.kernel.name()).or_default() += 1;
    let mut error = [0 as c_char; 512];
    let raw = RawLaunch {
        kernel: launch.kernel.0,
        grid: launch.grid.blocks,
        block: launch.grid.threads,
        dynamic_shared_bytes: launch.grid.shared_bytes,
        shared_limit: launch.shared_limit,
        seed: launch.seed,
        params_size: size_of_val(launch.params) as u32,
        params: launch.params.as_ptr().cast(),
        allocations: allocations.as_mut_ptr(),
        n_allocations: allocations.len() as u64,
        error: error.as_mut_ptr(),
        error_size: error.len() as u64,
    };
    // SAFETY: every pointer is to something that lives until the call returns; the kernel is one
    // of the list; the allocations are the caller's promise.
    if unsafe { linked::shim_launch(&raw) } == 0 {
        return Ok(());
    }
    // SAFETY: the shim writes sentences with snprintf, which ends them with a zero.
    let sentence = unsafe { CStr::from_ptr(error.as_ptr()) };
    Err(sentence.to_string_lossy().into_owned())
}
