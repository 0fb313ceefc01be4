//! Copies of columns and element-wise operations between the products of a layer
//! (`kernels/rows.cu`). Twins: the loops over vectors in `forward`.

use super::{DevicePtr, DeviceSlice, Grid, Kernel, Stream, kernel_params, kernels, u32_of};
use crate::Result;

const THREADS: u32 = 256;

kernel_params! {
    pub struct CopyColumnsParams[56] {
        from: DevicePtr,
        to: DevicePtr,
        from_stride: u64,
        from_first: u64,
        to_stride: u64,
        to_first: u64,
        cols: u32,
        rows: u32,
    }
}

kernel_params! {
    pub struct ValuesParams[24] {
        x: DevicePtr,
        y: DevicePtr,
        value: f32,
        n: u32,
    }
}

kernel_params! {
    pub struct MulRowsParams[24] {
        x: DevicePtr,
        y: DevicePtr,
        cols: u32,
        n: u32,
    }
}

kernels! {
    pub struct Rows {
        copy_columns: CopyColumnsParams = "copy_columns",
        mul_sigmoid: ValuesParams = "mul_sigmoid",
        scale: ValuesParams = "scale_values",
        divide: ValuesParams = "divide_values",
        add: ValuesParams = "add_values",
        set: ValuesParams = "set_values",
        clamp: ValuesParams = "clamp_values",
        cap: ValuesParams = "cap_values",
        mul_rows: MulRowsParams = "mul_rows",
    }
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
    /// Copies `cols` columns of `rows` rows. What is written must not overlap what is read.
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
        let params = CopyColumnsParams {
            from: from.data.into(),
            to: to.data.into(),
            from_stride: from.stride as u64,
            from_first: from.first as u64,
            to_stride: to.stride as u64,
            to_first: to.first as u64,
            cols: u32_of(cols),
            rows: u32_of(rows),
        };
        // SAFETY: the rows have these columns (asserted).
        unsafe { stream.launch(self.copy_columns, Grid::each(cols * rows, THREADS), &params) }
    }

    /// `x = x · sigmoid(gate)`
    pub fn mul_sigmoid(&self, stream: &Stream, x: DeviceSlice, gate: DeviceSlice) -> Result<()> {
        assert_eq!(x.count::<f32>(), gate.count::<f32>());
        let params = ValuesParams { x: x.into(), y: gate.into(), ..Default::default() };
        self.each(stream, self.mul_sigmoid, params, x)
    }

    /// `x = x · factor`
    pub fn scale(&self, stream: &Stream, x: DeviceSlice, factor: f32) -> Result<()> {
        let params = ValuesParams { x: x.into(), value: factor, ..Default::default() };
        self.each(stream, self.scale, params, x)
    }

    /// `x = x / divisor`
    pub fn divide(&self, stream: &Stream, x: DeviceSlice, divisor: f32) -> Result<()> {
        let params = ValuesParams { x: x.into(), value: divisor, ..Default::default() };
        self.each(stream, self.divide, params, x)
    }

    /// `x = x + y`
    pub fn add(&self, stream: &Stream, x: DeviceSlice, y: DeviceSlice) -> Result<()> {
        assert_eq!(x.count::<f32>(), y.count::<f32>());
        let params = ValuesParams { x: x.into(), y: y.into(), ..Default::default() };
        self.each(stream, self.add, params, x)
    }

    /// `x = value`
    pub fn set(&self, stream: &Stream, x: DeviceSlice, value: f32) -> Result<()> {
        let params = ValuesParams { x: x.into(), value, ..Default::default() };
        self.each(stream, self.set, params, x)
    }

    /// `x = clamp(x, ±limit)`
    pub fn clamp(&self, stream: &Stream, x: DeviceSlice, limit: f32) -> Result<()> {
        let params = ValuesParams { x: x.into(), value: limit, ..Default::default() };
        self.each(stream, self.clamp, params, x)
    }

    /// `x = cap·tanh(x / cap)`
    pub fn soft_cap(&self, stream: &Stream, x: DeviceSlice, cap: f32) -> Result<()> {
        let params = ValuesParams { x: x.into(), value: cap, ..Default::default() };
        self.each(stream, self.cap, params, x)
    }

    /// Multiplies each row of `x` [rows, cols] by its number of `factors` `[rows]`.
    pub fn mul_rows(&self, stream: &Stream, x: DeviceSlice, factors: DeviceSlice) -> Result<()> {
        let (n, rows) = (x.count::<f32>(), factors.count::<f32>());
        if n == 0 {
            return Ok(());
        }
        assert!(n.is_multiple_of(rows), "{n} values in {rows} rows");
        let (cols, n) = (u32_of(n / rows), u32_of(n));
        let params = MulRowsParams { x: x.into(), y: factors.into(), cols, n };
        // SAFETY: each row has a factor (asserted).
        unsafe { stream.launch(self.mul_rows, Grid::each(n as usize, THREADS), &params) }
    }

    /// Launches a thread for each value of `x`.
    fn each(
        &self,
        stream: &Stream,
        kernel: Kernel<ValuesParams>,
        params: ValuesParams,
        x: DeviceSlice,
    ) -> Result<()> {
        let n = x.count::<f32>();
        if n == 0 {
            return Ok(());
        }
        let params = ValuesParams { n: u32_of(n), ..params };
        // SAFETY: the callers have checked the sizes.
        unsafe { stream.launch(kernel, Grid::each(n, THREADS), &params) }
    }
}
