//! The header of a trace. Layout, after its length: model name (u16 length, UTF-8), model key (32
//! bytes), u32 n_embd, u32 k, u8 precision (0 compact, 1 exact; 2 more without probabilities), u8
//! whether there are hidden states, u8 the largest distance ahead, u32 layers; then for each layer
//! u32 experts (0: dense), u64 bytes of an expert, u32 granules of an expert, u64 bytes of a slot.

use super::bytes::{Bytes, Fault, put_string};
use crate::policy::ModelKey;

/// Larger distances carry no information: a layer's activation no longer predicts that layer's
/// routing.
pub const MAX_AHEAD: usize = 6;

/// Ids of experts are u16.
const MAX_EXPERTS: usize = 1 << 16;
const MAX_N_EMBD: usize = 1 << 24;
const LAYER_BYTES: usize = 24;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Probabilities are one byte, vectors f16.
    #[default]
    Compact,
    /// All values are the f32 that they were.
    Exact,
}

/// A layer's routed experts as a tier sees them; all 0 where the layer is dense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerShape {
    pub n_experts: usize,
    /// Bytes of one expert in the file.
    pub expert_bytes: u64,
    pub n_granules: usize,
    /// Bytes of one granule in a tier.
    pub slot_bytes: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// For people; `key` says which model it is.
    pub model: String,
    pub key: ModelKey,
    pub n_embd: usize,
    /// Experts that a token uses in each MoE layer.
    pub k: usize,
    pub layers: Vec<LayerShape>,
    pub precision: Precision,
    /// Whether the routers' probabilities are unknown: chosen experts are all that there is.
    pub ids_only: bool,
    /// Whether decode steps have hidden states.
    pub hidden: bool,
    /// The largest distance of routers on earlier activations of decode steps; 0: none.
    pub ahead: usize,
}

impl Header {
    /// Layers that have routed experts, in order.
    pub fn moe_layers(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (0..self.layers.len()).filter(|layer| self.layers[*layer].n_experts > 0)
    }

    /// Refuses what `decode` would refuse.
    pub(super) fn encode(&self) -> Result<Vec<u8>, Fault> {
        self.check()?;
        let count = |n: usize| (n as u32).to_le_bytes();
        let mut out = Vec::new();
        put_string(&self.model, &mut out);
        out.extend(self.key);
        out.extend(count(self.n_embd));
        out.extend(count(self.k));
        let exact = u8::from(self.precision == Precision::Exact);
        let values = exact | u8::from(self.ids_only) << 1;
        out.extend([values, self.hidden.into(), self.ahead as u8]);
        out.extend(count(self.layers.len()));
        for layer in &self.layers {
            out.extend(count(layer.n_experts));
            out.extend(layer.expert_bytes.to_le_bytes());
            out.extend(count(layer.n_granules));
            out.extend(layer.slot_bytes.to_le_bytes());
        }
        Ok(out)
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Header, Fault> {
        let mut rest = Bytes::new("header, ", bytes);
        let model = rest.string("name of the model")?.to_string();
        let key = rest.array("key of the model")?;
        let n_embd = rest.count(MAX_N_EMBD, "width of the model")?;
        let k = rest.count(MAX_EXPERTS, "experts of a token")?;
        let (precision, ids_only) = match rest.u8("precision")? {
            byte @ 0..4 => {
                let exact = byte & 1 == 1;
                (if exact { Precision::Exact } else { Precision::Compact }, byte & 2 == 2)
            }
            byte => return Err(rest.fault(1, "0 to 3 as precision", byte)),
        };
        let hidden = flag(&mut rest, "hidden states")?;
        let ahead = rest.u8("distances ahead")?.into();
        let n_layers = rest.count(rest.len() / LAYER_BYTES, "layers")?;
        let mut layers = Vec::with_capacity(n_layers);
        for _ in 0..n_layers {
            layers.push(LayerShape {
                n_experts: rest.count(MAX_EXPERTS, "experts of a layer")?,
                expert_bytes: rest.u64("bytes of an expert")?,
                n_granules: rest.u32("granules of an expert")? as usize,
                slot_bytes: rest.u64("bytes of a slot")?,
            });
        }
        rest.end()?;
        let header = Header { model, key, n_embd, k, layers, precision, ids_only, hidden, ahead };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), Fault> {
        match self.fault() {
            Some((expected, got)) => Err(Fault::new("header", expected, got)),
            None => Ok(()),
        }
    }

    /// The first number out of range: expected, got.
    fn fault(&self) -> Option<(String, usize)> {
        let most = |max: usize, what: &str, n: usize| {
            (n > max).then(|| (format!("at most {max} {what}"), n))
        };
        let layer = |layer: &LayerShape| {
            let none =
                (self.k == 0 && layer.n_experts > 0).then(|| ("experts of a token".into(), 0));
            none.or(most(MAX_EXPERTS, "experts of a layer", layer.n_experts)).or(most(
                u32::MAX as usize,
                "granules of an expert",
                layer.n_granules,
            ))
        };
        most(MAX_AHEAD, "distances ahead", self.ahead)
            .or(most(MAX_N_EMBD, "values of an embedding", self.n_embd))
            .or(most(MAX_EXPERTS, "experts of a token", self.k))
            .or(self.layers.iter().find_map(layer))
    }
}

fn flag(rest: &mut Bytes<'_>, name: &str) -> Result<bool, Fault> {
    match rest.u8(name)? {
        byte @ 0..2 => Ok(byte == 1),
        byte => Err(rest.fault(1, format!("0 or 1 as {name}"), byte)),
    }
}
