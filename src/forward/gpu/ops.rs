//! The kernels of the layer loop, loaded once for each device.

use crate::Result;
use crate::backend::gpu::Device;
use crate::backend::gpu::activate::Activate;
use crate::backend::gpu::acts::Quantize;
use crate::backend::gpu::attention::Attention;
use crate::backend::gpu::attention_inputs::AttentionInputs;
use crate::backend::gpu::block_keys::BlockKeys;
use crate::backend::gpu::cache::CacheStore;
use crate::backend::gpu::compress::Compress;
use crate::backend::gpu::conv::Conv;
use crate::backend::gpu::delta::Delta;
use crate::backend::gpu::expert::Experts;
use crate::backend::gpu::group::Grouper;
use crate::backend::gpu::halves::Halves;
use crate::backend::gpu::heads::Heads;
use crate::backend::gpu::index::Index;
use crate::backend::gpu::matmul::Products;
use crate::backend::gpu::norm::Norm;
use crate::backend::gpu::rope::Rope;
use crate::backend::gpu::router::Router;
use crate::backend::gpu::rows::Rows;
use crate::backend::gpu::sample::Sample;
use crate::backend::gpu::scan::Scanner;
use crate::backend::gpu::slots::Resolve;
use crate::backend::gpu::streams::Streams;
use crate::gguf::TensorType;
use crate::model::Model;
use crate::quant;

pub struct Ops {
    pub norm: Norm,
    pub rows: Rows,
    pub quantize: Quantize,
    pub products: Products,
    pub halves: Halves,
    pub heads: Heads,
    pub rope: Rope,
    pub store: CacheStore,
    pub inputs: AttentionInputs,
    pub attention: Attention,
    pub compress: Compress,
    pub index: Index,
    pub block_keys: BlockKeys,
    pub conv: Conv,
    pub delta: Delta,
    pub scan: Scanner,
    pub router: Router,
    pub resolve: Resolve,
    pub group: Grouper,
    pub activate: Activate,
    pub experts: Experts,
    pub streams: Streams,
    pub sample: Sample,
}

impl Ops {
    /// For models with matrices of these types: a driver compiles each kernel that is found when a
    /// program first starts.
    pub fn load(gpu: &Device, types: &[TensorType]) -> Result<Ops> {
        Ok(Ops {
            norm: Norm::load(gpu)?,
            rows: Rows::load(gpu)?,
            quantize: Quantize::load(gpu)?,
            products: Products::load(gpu, types)?,
            halves: Halves::load(gpu, types)?,
            heads: Heads::load(gpu, types)?,
            rope: Rope::load(gpu)?,
            store: CacheStore::load(gpu)?,
            inputs: AttentionInputs::load(gpu)?,
            attention: Attention::load(gpu)?,
            compress: Compress::load(gpu)?,
            index: Index::load(gpu)?,
            block_keys: BlockKeys::load(gpu)?,
            conv: Conv::load(gpu)?,
            delta: Delta::load(gpu)?,
            scan: Scanner::load(gpu)?,
            router: Router::load(gpu)?,
            resolve: Resolve::load(gpu)?,
            group: Grouper::load(gpu)?,
            activate: Activate::load(gpu)?,
            experts: Experts::load(gpu, types)?,
            streams: Streams::load(gpu)?,
            sample: Sample::load(gpu)?,
        })
    }
}

/// The types of a model's tensors that are computed with.
pub fn types_of(model: &Model) -> Vec<TensorType> {
    let is_in_file = |ty: &TensorType| model.gguf().tensors().iter().any(|tensor| tensor.ty == *ty);
    // Vectors are f32 on a device, whatever they are in the file.
    let is_used = |ty: &TensorType| *ty == TensorType::F32 || is_in_file(ty);
    TensorType::all().filter(|ty| quant::is_supported(*ty) && is_used(ty)).collect()
}
