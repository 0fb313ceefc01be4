//! A device with a stream, the CPU, the values that both compute with, and the report.

use super::data::Random;
use super::report::{Report, Row};
use crate::backend::cpu::Cpu;
use crate::backend::gpu::{Device, DeviceBuffer, DeviceSlice, Stream};
use crate::{Error, Result};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use std::cell::{RefCell, RefMut};
use std::ops::{Deref, DerefMut};

/// The amount of checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Small shapes, one or two of each kernel: seconds on an emulated device.
    Quick,
    /// Also sizes that fill no block, warp or tile: for the project's own tests.
    Odd,
    /// Also shapes of real models.
    Full,
}

pub struct Bench {
    pub gpu: Device,
    pub stream: Stream,
    pub cpu: Cpu,
    extent: Extent,
    report: RefCell<Report>,
}

/// Values on the host and on the device.
pub struct Mirror<T> {
    pub host: Vec<T>,
    pub device: DeviceBuffer,
}

impl<T> Mirror<T> {
    pub fn gpu(&self) -> DeviceSlice<'_> {
        self.device.all()
    }
}

impl<T> Deref for Mirror<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.host
    }
}

impl<T> DerefMut for Mirror<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.host
    }
}

/// Numbers that can be uploaded and compared.
pub trait Value: Pod + PartialEq + ToString {
    fn compare(row: &mut Row, shape: impl ToString, got: &[Self], expected: &[Self]) {
        row.words(shape, got, expected);
    }
}

impl Value for u8 {}
impl Value for u32 {}
impl Value for u64 {}

impl Value for f32 {
    fn compare(row: &mut Row, shape: impl ToString, got: &[f32], expected: &[f32]) {
        row.bits(shape, got, expected);
    }
}

impl Bench {
    pub fn new(gpu: &Device, extent: Extent) -> Result<Bench> {
        let (stream, report) = (Stream::new(gpu)?, RefCell::default());
        Ok(Bench { gpu: gpu.clone(), stream, cpu: Cpu::new(1), extent, report })
    }

    pub fn into_report(self) -> Report {
        self.report.into_inner()
    }

    /// The small shapes; with `Extent::Odd` also the odd ones, with `Extent::Full` the large ones
    /// too.
    pub fn shapes<T: Copy>(&self, small: &[T], odd: &[T], large: &[T]) -> Vec<T> {
        match self.extent {
            Extent::Quick => small.to_vec(),
            Extent::Odd => [small, odd].concat(),
            Extent::Full => [small, odd, large].concat(),
        }
    }

    /// How often operations are repeated that go wrong only sometimes.
    pub fn rounds(&self) -> usize {
        if self.extent == Extent::Full { 1000 } else { 20 }
    }

    /// A row of the report. Comparisons within `compare` go into it.
    pub fn row(&self, kernel: &str, format: impl ToString, compare: impl FnOnce() -> Result<()>) {
        self.report.borrow_mut().begin(kernel, format);
        let result = compare();
        self.report.borrow_mut().end(result);
    }

    /// A row of the report, whose shapes are compared one by one.
    pub fn each<S>(
        &self,
        kernel: &str,
        format: impl ToString,
        shapes: impl IntoIterator<Item = S>,
        compare: impl FnMut(S) -> Result<()>,
    ) {
        self.row(kernel, format, || shapes.into_iter().try_for_each(compare));
    }

    /// A family that could not be loaded.
    pub fn failed(&self, family: &str, error: &Error) {
        self.row(family, "", || Err(Error::Device(error.to_string())));
    }

    fn open(&self) -> RefMut<'_, Row> {
        RefMut::map(self.report.borrow_mut(), Report::open)
    }

    pub fn leave_out(&self, why: &str) {
        self.open().leave_out(why);
    }

    /// Compares the halves to the bit.
    pub fn equal<T: Value>(&self, shape: impl ToString, x: &Mirror<T>) -> Result<()> {
        self.equal_to(shape, &x.device, x)
    }

    /// Compares what the device holds to the bit.
    pub fn equal_to<T: Value>(
        &self,
        shape: impl ToString,
        got: &DeviceBuffer,
        expected: &[T],
    ) -> Result<()> {
        self.equal_values(shape, &self.down(got)?, expected)
    }

    pub fn equal_values<T: Value>(
        &self,
        shape: impl ToString,
        got: &[T],
        expected: &[T],
    ) -> Result<()> {
        T::compare(&mut self.open(), shape, got, expected);
        Ok(())
    }

    /// Numbers that may differ by `bound` times the largest expected one.
    pub fn near(
        &self,
        shape: impl ToString,
        got: &[f32],
        expected: &[f32],
        bound: f64,
    ) -> Result<()> {
        self.open().near(shape, got, expected, bound);
        Ok(())
    }

    pub fn empty(&self, bytes: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::new(&self.gpu, bytes)
    }

    /// `n` values that the kernel has to write: zeros on the host, any bytes on the device.
    pub fn out<T: Value>(&self, n: usize) -> Result<Mirror<T>> {
        Ok(Mirror { host: vec![T::zeroed(); n], device: self.empty(size_of::<T>() * n)? })
    }

    pub fn up<T: Value>(&self, values: impl IntoIterator<Item = T>) -> Result<Mirror<T>> {
        let host = Vec::from_iter(values);
        let device = self.empty(size_of_val(&host[..]))?;
        self.stream.upload_now(device.all(), cast_slice(&host))?;
        Ok(Mirror { host, device })
    }

    /// A single u32.
    pub fn word(&self, value: usize) -> Result<Mirror<u32>> {
        self.up([value as u32])
    }

    /// Vectors of these lengths, one after the other from the sequence.
    pub fn floats<const N: usize>(
        &self,
        random: &mut Random,
        lengths: [usize; N],
    ) -> Result<[Mirror<f32>; N]> {
        try_map(lengths, |n| self.up(random.floats(n)))
    }

    /// `floats` of a sequence of their own.
    pub fn seeded<const N: usize>(
        &self,
        seed: usize,
        lengths: [usize; N],
    ) -> Result<[Mirror<f32>; N]> {
        self.floats(&mut Random(seed as u64), lengths)
    }

    pub fn down<T: Value>(&self, buffer: &DeviceBuffer) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); buffer.len() / size_of::<T>()];
        self.stream.download_now(cast_slice_mut(&mut values), buffer.all())?;
        Ok(values)
    }
}

/// `array::map` with a function that can fail.
pub fn try_map<T, U, const N: usize>(of: [T; N], f: impl FnMut(T) -> Result<U>) -> Result<[U; N]> {
    let all: Vec<U> = of.into_iter().map(f).collect::<Result<_>>()?;
    Ok(all.try_into().ok().expect("one for each"))
}
