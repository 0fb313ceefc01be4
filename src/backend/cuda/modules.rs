//! The modules that a device has loaded: cubins, each with all kernels of its source; PTX, a kernel
//! at a time, where there is no cubin for the device or the driver refuses it.

use super::library::failed;
use super::ptx::{MODULES, kernel_text, module_of};
use crate::backend::gpu::Version;
use cudarc::driver::{DriverError, result, sys};
use std::collections::HashMap;
use std::ffi::CString;

type Found<T> = Result<Option<T>, DriverError>;

#[derive(Default)]
pub struct Modules {
    /// By index into `MODULES`; None if the kernels are compiled from PTX.
    cubins: HashMap<usize, Option<sys::CUmodule>>,
    /// By kernel.
    compiled: HashMap<String, sys::CUmodule>,
    has_refused: bool,
}

// SAFETY: handles of the driver may be used from any thread whose current context is theirs.
unsafe impl Send for Modules {}

impl Modules {
    /// The kernel on a device of this compute capability, whose context is current. None if there
    /// is no such kernel.
    pub fn find(&mut self, kernel: &str, compute: Version) -> Found<sys::CUfunction> {
        let Some(at) = module_of(kernel, compute) else { return Ok(None) };
        let module = match self.cubin(at, compute) {
            Some(module) => Some(module),
            None => self.compile(at, kernel)?,
        };
        let (Some(module), Ok(name)) = (module, CString::new(kernel)) else { return Ok(None) };
        // SAFETY: the module stays loaded until `unload`.
        unsafe { result::module::get_function(module, name) }.map(Some)
    }

    fn cubin(&mut self, at: usize, compute: Version) -> Option<sys::CUmodule> {
        if let Some(loaded) = self.cubins.get(&at) {
            return *loaded;
        }
        let loaded = MODULES[at].cubin(compute).and_then(|cubin| {
            let image = cubin.image();
            // SAFETY: the image is a whole ELF file, which says how long it is.
            match unsafe { result::module::load_data(image.as_ptr().cast()) } {
                Ok(module) => Some(module),
                Err(error) => {
                    self.tell_refusal(error);
                    None
                }
            }
        });
        self.cubins.insert(at, loaded);
        loaded
    }

    fn tell_refusal(&mut self, error: DriverError) {
        if !self.has_refused {
            let error = failed("the driver refuses the machine code and compiles the PTX", error);
            log::warn!("{error}");
        }
        self.has_refused = true;
    }

    fn compile(&mut self, at: usize, kernel: &str) -> Found<sys::CUmodule> {
        if let Some(module) = self.compiled.get(kernel) {
            return Ok(Some(*module));
        }
        let Some(text) = kernel_text(at, kernel) else { return Ok(None) };
        // SAFETY: the driver takes PTX that ends with a zero byte.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) }?;
        self.compiled.insert(kernel.to_owned(), module);
        Ok(Some(module))
    }

    /// Unloads everything. Nothing runs any more.
    pub fn unload(&mut self) {
        let cubins = self.cubins.drain().filter_map(|(_, module)| module);
        for module in cubins.chain(self.compiled.drain().map(|(_, module)| module)) {
            // SAFETY: loaded here, once. A failure leaks it.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}
