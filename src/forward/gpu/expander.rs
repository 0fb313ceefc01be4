//! The kernels that make keys and values of latent attention's heads (`expanded.rs`).

use crate::Result;
use crate::backend::gpu::embed::Embed;
use crate::backend::gpu::latent::Expand;
use crate::backend::gpu::mat::DeviceMat;
use crate::backend::gpu::{Device, DeviceSlice, Stream};
use crate::forward::gpu::layers::GpuLayer;
use crate::gguf::TensorType;
use crate::model::weights::{Mixer, Weights};

/// Rows of a matrix that are decoded at once.
const IDS_MAX: usize = 1 << 15;

/// The numbers of rows that [`Expander::decode`] needs.
pub fn n_ids(weights: &Weights) -> usize {
    let rows = weights.layers.iter().map(|layer| match &layer.mixer {
        Mixer::Latent(w) => w.k_b.all.rows.max(w.v_b.all.rows),
        _ => 0,
    });
    rows.max().unwrap_or(0).min(IDS_MAX)
}

pub struct Expander {
    embed: Embed,
    pub expand: Expand,
}

impl Expander {
    /// `None` for models whose layers on the device have no latent attention.
    pub fn load(gpu: &Device, layers: &[Option<GpuLayer>]) -> Result<Option<Expander>> {
        let latent = layers.iter().flatten().filter_map(|layer| match &layer.mixer {
            Mixer::Latent(w) => Some(w),
            _ => None,
        });
        let mut types: Vec<_> = latent.flat_map(|w| [w.k_b.all.ty, w.v_b.all.ty]).collect();
        types.sort_by_key(|ty| ty.id());
        types.dedup();
        if types.is_empty() {
            return Ok(None);
        }
        Ok(Some(Expander { embed: Embed::load(gpu, &types)?, expand: Expand::load(gpu)? }))
    }

    /// The matrix as f32, in `memory` if it is of another type. `ids` are u32: 0, 1, …
    pub fn decode<'a>(
        &self,
        stream: &Stream,
        mat: DeviceMat<'a>,
        ids: DeviceSlice,
        memory: DeviceSlice<'a>,
    ) -> Result<DeviceMat<'a>> {
        if mat.ty == TensorType::F32 {
            return Ok(mat);
        }
        let all = DeviceMat::dense(TensorType::F32, memory, mat.rows, mat.cols);
        let at_once = ids.count::<u32>();
        for first in (0..mat.rows).step_by(at_once) {
            let rows = at_once.min(mat.rows - first);
            let data = mat.data.slice(first * mat.row_stride..mat.data.len());
            let table = DeviceMat { data, rows, ..mat };
            let out = memory.slice(first * all.row_stride..memory.len());
            // SAFETY: the ids count from 0, and the table has as many rows as it is read of.
            unsafe { self.embed.launch(stream, table, ids, rows, out)? };
        }
        Ok(all)
    }
}
