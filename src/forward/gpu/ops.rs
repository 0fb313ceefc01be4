//! The kernels of the layer loop, loaded once for each device.

use crate::Result;
use crate::backend::gpu::Device;
use crate::backend::gpu::activate::Activate;
use crate::backend::gpu::acts::Quantize;
use crate::backend::gpu::attention::Attention;
use crate::backend::gpu::cache::CacheStore;
use crate::backend::gpu::delta::Delta;
use crate::backend::gpu::expert::Experts;
use crate::backend::gpu::heads::Heads;
use crate::backend::gpu::matmul::Products;
use crate::backend::gpu::norm::Norm;
use crate::backend::gpu::rope::Rope;
use crate::backend::gpu::router::Router;
use crate::backend::gpu::rows::Rows;
use crate::backend::gpu::sample::Sample;
use crate::backend::gpu::slots::Resolve;

pub struct Ops {
    pub norm: Norm,
    pub rows: Rows,
    pub quantize: Quantize,
    pub products: Products,
    pub heads: Heads,
    pub rope: Rope,
    pub store: CacheStore,
    pub attention: Attention,
    pub delta: Delta,
    pub router: Router,
    pub resolve: Resolve,
    pub activate: Activate,
    pub experts: Experts,
    pub sample: Sample,
}

impl Ops {
    pub fn load(gpu: &Device) -> Result<Ops> {
        Ok(Ops {
            norm: Norm::load(gpu)?,
            rows: Rows::load(gpu)?,
            quantize: Quantize::load(gpu)?,
            products: Products::load(gpu)?,
            heads: Heads::load(gpu)?,
            rope: Rope::load(gpu)?,
            store: CacheStore::load(gpu)?,
            attention: Attention::load(gpu)?,
            delta: Delta::load(gpu)?,
            router: Router::load(gpu)?,
            resolve: Resolve::load(gpu)?,
            activate: Activate::load(gpu)?,
            experts: Experts::load(gpu)?,
            sample: Sample::load(gpu)?,
        })
    }
}
