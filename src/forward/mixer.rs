//! The trait of a layer's mixer on the CPU.

use crate::Result;
use crate::forward::CpuPass;
use crate::forward::attention::MixerBuffers;
use crate::model::weights::{Mixer, any_mixer};
use crate::simd::Floats;

/// A mixer on the CPU: weights of one kind.
pub(super) trait CpuMixer {
    /// y = mixed(h), the normalised input of layer `l`, each row with what is before it in its
    /// text's cache.
    fn mix(
        &self,
        pass: &mut CpuPass,
        l: usize,
        h: &[f32],
        m: &mut MixerBuffers,
        y: &mut Floats,
    ) -> Result<()>;
}

/// `None` for a layer that has a feed-forward part only.
pub(super) fn on_cpu(mixer: &Mixer) -> Option<&dyn CpuMixer> {
    any_mixer!(mixer)
}
