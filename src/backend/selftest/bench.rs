//! A device with a stream, the CPU, and helpers for uploads and downloads.

use super::Extent;
use crate::Result;
use crate::backend::cpu::Cpu;
use crate::backend::gpu::{Device, DeviceBuffer, Stream};

pub struct Bench {
    pub gpu: Device,
    pub stream: Stream,
    pub cpu: Cpu,
    extent: Extent,
}

impl Bench {
    pub fn new(gpu: &Device, extent: Extent) -> Result<Bench> {
        Ok(Bench { gpu: gpu.clone(), stream: Stream::new(gpu)?, cpu: Cpu::new(1), extent })
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

    pub fn empty(&self, bytes: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::new(&self.gpu, bytes)
    }

    pub fn up(&self, bytes: &[u8]) -> Result<DeviceBuffer> {
        let buffer = self.empty(bytes.len())?;
        self.stream.upload_now(buffer.all(), bytes)?;
        Ok(buffer)
    }

    pub fn up_f32(&self, x: &[f32]) -> Result<DeviceBuffer> {
        self.up(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub fn up_u32(&self, x: &[u32]) -> Result<DeviceBuffer> {
        self.up(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub fn up_u64(&self, x: &[u64]) -> Result<DeviceBuffer> {
        self.up(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub fn down(&self, buffer: &DeviceBuffer) -> Result<Vec<u8>> {
        let mut bytes = vec![0; buffer.len()];
        self.stream.download_now(&mut bytes, buffer.all())?;
        Ok(bytes)
    }

    pub fn down_u32(&self, buffer: &DeviceBuffer) -> Result<Vec<u32>> {
        let bytes = self.down(buffer)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
    }

    pub fn down_u64(&self, buffer: &DeviceBuffer) -> Result<Vec<u64>> {
        let bytes = self.down(buffer)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }

    pub fn down_f32(&self, buffer: &DeviceBuffer) -> Result<Vec<f32>> {
        Ok(self.down_u32(buffer)?.into_iter().map(f32::from_bits).collect())
    }
}
