//! Activation functions element by element, and softmax by row (`kernels/activate.cu`); twins in
//! `simd::scalar` and `cpu::expert`.

use super::{Args, Device, DeviceSlice, Kernel, Launch, Stream};
use crate::Result;
use crate::backend::ops::Activation;

const THREADS: u32 = 256;

pub struct Activate {
    swiglu: Kernel,
    swiglu_clamped: Kernel,
    relu: Kernel,
    sigmoid: Kernel,
    softmax: Kernel,
}

impl Activate {
    pub fn load(gpu: &Device) -> Result<Activate> {
        Ok(Activate {
            swiglu: gpu.kernel("swiglu_rows")?,
            swiglu_clamped: gpu.kernel("swiglu_clamped_rows")?,
            relu: gpu.kernel("relu_rows")?,
            sigmoid: gpu.kernel("sigmoid_rows")?,
            softmax: gpu.kernel("softmax_rows")?,
        })
    }

    /// `out = activation(gate, up)`, all f32 of one shape; `Relu` reads no gate.
    pub fn gated(
        &self,
        stream: &Stream,
        activation: Activation,
        gate: Option<DeviceSlice>,
        up: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let n = out.count::<f32>();
        assert_eq!(n, up.count::<f32>());
        let args = match gate.filter(|_| activation.is_gated()) {
            Some(gate) => {
                assert_eq!(n, gate.count::<f32>());
                Args::new().slice(gate)
            }
            None => {
                assert!(!activation.is_gated(), "{activation:?} needs a gate");
                Args::new()
            }
        };
        let kernel = match activation {
            Activation::Silu => self.swiglu,
            Activation::SiluClamped => self.swiglu_clamped,
            Activation::Relu => self.relu,
        };
        self.each(stream, kernel, &args.slice(up).slice(out).size(n), n)
    }

    /// `x = 1/(1 + e^−x)`
    pub fn sigmoid(&self, stream: &Stream, x: DeviceSlice) -> Result<()> {
        let n = x.count::<f32>();
        self.each(stream, self.sigmoid, &Args::new().slice(x).size(n), n)
    }

    fn each(&self, stream: &Stream, kernel: Kernel, args: &Args, n: usize) -> Result<()> {
        if n == 0 {
            return Ok(());
        }
        // SAFETY: the arguments are the kernel's; the callers have checked the sizes.
        unsafe { stream.launch(&Launch::each(kernel, n, THREADS, args)) }
    }

    /// Softmax of each row of `x` f32 [rows, n] in place, a warp a row.
    ///
    /// # Panics
    /// If a row does not fit a block's shared memory.
    pub fn softmax_rows(&self, stream: &Stream, x: DeviceSlice, n: usize) -> Result<()> {
        let all = x.count::<f32>();
        assert!(n > 0 && all.is_multiple_of(n), "{all} in rows of {n}");
        let shared_bytes = 4 * n as u32;
        assert!(shared_bytes <= stream.gpu().info().shared_bytes_max, "rows of {n}");
        if all == 0 {
            return Ok(());
        }
        let args = Args::new().slice(x).size(n);
        let (grid, block) = ([(all / n) as u32, 1, 1], [32, 1, 1]);
        let launch = Launch { kernel: self.softmax, grid, block, shared_bytes, args: &args };
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&launch) }
    }
}
