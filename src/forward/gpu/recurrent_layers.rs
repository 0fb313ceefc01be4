//! Convolutions, Mamba and lightning attention on the device: their weights, uploaded.

use crate::backend::ops::ScanShape;
use crate::forward::gpu::weights::{GpuConv, GpuLinear, GpuVector};
use crate::model::recurrent::{Mamba2Shape, MambaShape};

/// See `ShortConvWeights`.
pub struct GpuShortConv {
    pub input: GpuLinear,
    pub conv: GpuConv,
    pub output: GpuLinear,
}

/// See `MambaWeights`.
pub struct GpuMamba {
    pub shape: MambaShape,
    pub input: GpuLinear,
    pub conv: GpuConv,
    pub scan: GpuLinear,
    pub norms: [GpuVector; 3],
    pub steps: GpuLinear,
    pub log_decay: GpuVector,
    pub skip: GpuVector,
    pub output: GpuLinear,
}

/// See `Mamba2Weights`.
pub struct GpuMamba2 {
    pub shape: Mamba2Shape,
    pub input: GpuLinear,
    pub conv: GpuConv,
    pub step_bias: GpuVector,
    pub log_decay: GpuVector,
    pub skip: GpuVector,
    pub norm: GpuVector,
    pub output: GpuLinear,
}

/// See `LightningWeights`.
pub struct GpuLightning {
    pub shape: ScanShape,
    pub qkv: GpuLinear,
    pub log_decay: GpuVector,
    pub norm: GpuVector,
    pub gate: GpuLinear,
    pub output: GpuLinear,
}
