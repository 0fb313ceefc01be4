//! Rows moved and numbers changed one by one (`kernels/rows.cu`): what stands between the products
//! of a layer. Twins are the loops over vectors in `model`.

use super::{Args, Device, DeviceSlice, Kernel, Launch, Stream};
use crate::Result;

const THREADS: u32 = 256;

pub struct Rows {
    copy_columns: Kernel,
    mul_sigmoid: Kernel,
    scale: Kernel,
    divide: Kernel,
    add: Kernel,
    set: Kernel,
}

/// Columns of rows: f32 values from `first` on in rows that are `stride` values apart.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    pub data: DeviceSlice<'a>,
    pub stride: usize,
    pub first: usize,
}

impl<'a> Columns<'a> {
    pub fn new(data: DeviceSlice<'a>, stride: usize, first: usize) -> Columns<'a> {
        Columns { data, stride, first }
    }

    fn assert_has(&self, cols: usize, rows: usize) {
        assert!(self.first + cols <= self.stride, "columns of a row");
        let end = (rows - 1) * self.stride + self.first + cols;
        assert!(self.data.holds::<f32>(end), "{rows} rows of {} in {end}", self.stride);
    }
}

impl Rows {
    pub fn load(gpu: &Device) -> Result<Rows> {
        Ok(Rows {
            copy_columns: gpu.kernel("copy_columns")?,
            mul_sigmoid: gpu.kernel("mul_sigmoid")?,
            scale: gpu.kernel("scale_values")?,
            divide: gpu.kernel("divide_values")?,
            add: gpu.kernel("add_values")?,
            set: gpu.kernel("set_values")?,
        })
    }

    /// Copies `cols` columns of `rows` rows; the places written are none of those read.
    ///
    /// # Panics
    /// If a row has no such columns or there are not so many rows.
    pub fn copy_columns(
        &self,
        stream: &Stream,
        from: Columns,
        to: Columns,
        cols: usize,
        rows: usize,
    ) -> Result<()> {
        if cols == 0 || rows == 0 {
            return Ok(());
        }
        from.assert_has(cols, rows);
        to.assert_has(cols, rows);
        let place = |args: Args, columns: Columns| {
            args.slice(columns.data).u64(columns.stride as u64).u64(columns.first as u64)
        };
        let args = place(place(Args::new(), from), to).size(cols).size(rows);
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&Launch::each(self.copy_columns, cols * rows, THREADS, &args)) }
    }

    /// `x = x · sigmoid(gate)`
    pub fn mul_sigmoid(&self, stream: &Stream, x: DeviceSlice, gate: DeviceSlice) -> Result<()> {
        assert_eq!(x.count::<f32>(), gate.count::<f32>());
        self.each(stream, self.mul_sigmoid, Args::new().slice(x).slice(gate), x)
    }

    /// `x = x · factor`
    pub fn scale(&self, stream: &Stream, x: DeviceSlice, factor: f32) -> Result<()> {
        self.each(stream, self.scale, Args::new().slice(x).f32(factor), x)
    }

    /// `x = x / divisor`
    pub fn divide(&self, stream: &Stream, x: DeviceSlice, divisor: f32) -> Result<()> {
        self.each(stream, self.divide, Args::new().slice(x).f32(divisor), x)
    }

    /// `x = x + y`
    pub fn add(&self, stream: &Stream, x: DeviceSlice, y: DeviceSlice) -> Result<()> {
        assert_eq!(x.count::<f32>(), y.count::<f32>());
        self.each(stream, self.add, Args::new().slice(x).slice(y), x)
    }

    /// `x = value`
    pub fn set(&self, stream: &Stream, x: DeviceSlice, value: f32) -> Result<()> {
        self.each(stream, self.set, Args::new().slice(x).f32(value), x)
    }

    /// A thread for each value of `x`, which is the kernel's first argument.
    fn each(&self, stream: &Stream, kernel: Kernel, args: Args, x: DeviceSlice) -> Result<()> {
        let n = x.count::<f32>();
        if n == 0 {
            return Ok(());
        }
        // SAFETY: the arguments are the kernel's; the callers have checked the sizes.
        unsafe { stream.launch(&Launch::each(kernel, n, THREADS, &args.size(n))) }
    }
}
