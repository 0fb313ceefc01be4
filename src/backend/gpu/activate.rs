//! Activation functions element by element, and softmax by row (`kernels/activate.cu`). Twins:
//! `simd::scalar` and `cpu::expert`.

use super::{DevicePtr, DeviceSlice, Grid, Kernel, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::backend::ops::{Activation, ExpertForm};

const THREADS: u32 = 256;

kernel_params! {
    pub struct GatedParams[40] {
        gate: DevicePtr,
        up: DevicePtr,
        out: DevicePtr,
        n: u32,
        limit: f32,
        up_limit: f32,
        unused: u32,
    }
}

kernel_params! {
    pub struct InPlaceParams[16] {
        x: DevicePtr,
        n: u32,
        unused: u32,
    }
}

kernels! {
    pub struct Activate {
        swiglu: GatedParams = "swiglu_rows",
        swiglu_clamped: GatedParams = "swiglu_clamped_rows",
        relu: GatedParams = "relu_rows",
        relu_squared: GatedParams = "relu_squared_rows",
        reglu: GatedParams = "reglu_rows",
        geglu: GatedParams = "geglu_rows",
        swiglu_limited: GatedParams = "swiglu_limited_rows",
        swiglu_capped: GatedParams = "swiglu_capped_rows",
        situ: GatedParams = "situ_rows",
        sigmoid: InPlaceParams = "sigmoid_rows",
        softplus: InPlaceParams = "softplus_rows",
        softmax: InPlaceParams = "softmax_rows",
    }
}

impl Activate {
    /// `out = activation(gate, up)`, all f32 of one shape; those without a gate
    /// read none. Biases are not
    /// added.
    pub fn gated(
        &self,
        stream: &Stream,
        form: ExpertForm,
        gate: Option<DeviceSlice>,
        up: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let ExpertForm { activation, limit, up_limit, .. } = form;
        let n = out.count::<f32>();
        assert_eq!(n, up.count::<f32>());
        let gate = gate.filter(|_| activation.is_gated());
        match gate {
            Some(gate) => assert_eq!(n, gate.count::<f32>()),
            None => assert!(!activation.is_gated(), "{activation:?} needs a gate"),
        }
        let kernel = match activation {
            Activation::Silu => self.swiglu,
            Activation::SiluClamped => self.swiglu_clamped,
            Activation::Relu => self.relu,
            Activation::ReluSquared => self.relu_squared,
            Activation::ReluGated => self.reglu,
            Activation::Gelu => self.geglu,
            Activation::SiluLimited => self.swiglu_limited,
            Activation::SiluCapped => self.swiglu_capped,
            Activation::Situ => self.situ,
            Activation::GeluPlain | Activation::SiluPlain => {
                unreachable!("devices have no kernel for it")
            }
        };
        if n == 0 {
            return Ok(());
        }
        let (gate, up, out) = (gate.into(), up.into(), out.into());
        let params = GatedParams { gate, up, out, n: u32_of(n), limit, up_limit, unused: 0 };
        // SAFETY: the slices have n values each (asserted).
        unsafe { stream.launch(kernel, Grid::each(n, THREADS), &params) }
    }

    /// `x = 1/(1 + e^−x)`
    pub fn sigmoid(&self, stream: &Stream, x: DeviceSlice) -> Result<()> {
        self.in_place(stream, self.sigmoid, x)
    }

    /// `x = ln(1 + e^x)`
    pub fn softplus(&self, stream: &Stream, x: DeviceSlice) -> Result<()> {
        self.in_place(stream, self.softplus, x)
    }

    fn in_place(
        &self,
        stream: &Stream,
        kernel: Kernel<InPlaceParams>,
        x: DeviceSlice,
    ) -> Result<()> {
        let n = x.count::<f32>();
        if n == 0 {
            return Ok(());
        }
        let params = InPlaceParams { x: x.into(), n: u32_of(n), unused: 0 };
        // SAFETY: the slice has n values.
        unsafe { stream.launch(kernel, Grid::each(n, THREADS), &params) }
    }

    /// Softmax of each row of `x` f32 [rows, n] in place, a warp a row.
    ///
    /// # Panics
    /// If a row does not fit a block's shared memory.
    pub fn softmax_rows(&self, stream: &Stream, x: DeviceSlice, n: usize) -> Result<()> {
        let all = x.count::<f32>();
        assert!(n > 0 && all.is_multiple_of(n), "{all} in rows of {n}");
        assert!(4 * n <= stream.gpu().info().shared_bytes_max as usize, "rows of {n}");
        if all == 0 {
            return Ok(());
        }
        let params = InPlaceParams { x: x.into(), n: u32_of(n), unused: 0 };
        let grid = Grid::new([u32_of(all / n), 1, 1], 32).with_shared(4 * n);
        // SAFETY: the slice is a whole number of rows (asserted).
        unsafe { stream.launch(self.softmax, grid, &params) }
    }
}
