//! How large the experts are. Routing says which experts are used and nothing of their size, so
//! the routing of a small model can be replayed as if its experts were those of a published one.

use crate::experts::{LayerNeeds, Needs};

/// Granules of a published model's expert: no smaller than 1 MiB, no more than this.
const N_GRANULES_MAX: usize = 16;

/// Bytes of a model, a layer's being those of every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Geometry {
    /// Bytes of one routed expert.
    pub expert_bytes: usize,
    /// Parts in which an expert is moved and kept.
    pub n_granules: usize,
    /// Bytes of a layer's attention and router.
    pub attention_bytes: usize,
    /// Bytes of a layer's shared experts.
    pub shared_bytes: usize,
    /// Bytes of the output head.
    pub head_bytes: usize,
    /// Bytes of one weight.
    pub weight_bytes: f64,
}

/// Weights of a published model.
struct Published {
    name: &'static str,
    n_embd: usize,
    /// Intermediate rows of a routed expert.
    n_ff: usize,
    /// Intermediate rows of the shared experts together.
    n_ff_shared: usize,
    /// Weights of a layer's query, key, value and output projections.
    attention: usize,
    n_vocab: usize,
}

/// From the models' configurations on Hugging Face. Attention is n_embd × head sizes:
/// 2·(4096² + 4096·1024), 4·2048², 2·2048·(4096 + 512); the last two models share DeepSeek-V2's
/// latent attention, 2048·(3072 + 576) + 512·4096 + 2048².
const PUBLISHED: &[Published] = &[
    Published {
        name: "mixtral-8x7b",
        n_embd: 4096,
        n_ff: 14336,
        n_ff_shared: 0,
        attention: 41_943_040,
        n_vocab: 32000,
    },
    Published {
        name: "qwen1.5-moe",
        n_embd: 2048,
        n_ff: 1408,
        n_ff_shared: 5632,
        attention: 16_777_216,
        n_vocab: 151_936,
    },
    Published {
        name: "qwen3-30b-a3b",
        n_embd: 2048,
        n_ff: 768,
        n_ff_shared: 0,
        attention: 18_874_368,
        n_vocab: 151_936,
    },
    Published {
        name: "deepseek-v2-lite",
        n_embd: 2048,
        n_ff: 1408,
        n_ff_shared: 2816,
        attention: 13_762_560,
        n_vocab: 102_400,
    },
    Published {
        name: "moonlight-16b-a3b",
        n_embd: 2048,
        n_ff: 1408,
        n_ff_shared: 2816,
        attention: 13_762_560,
        n_vocab: 163_840,
    },
];

impl Geometry {
    /// Names that `published` knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        PUBLISHED.iter().map(|model| model.name)
    }

    /// A published model in 16 bits a weight, which is how the papers ran them.
    pub fn published(name: &str) -> Option<Geometry> {
        let model = PUBLISHED.iter().find(|model| model.name == name)?;
        let weight_bytes = 2;
        // Gate, up and down.
        let ffn = |n_ff: usize| 3 * model.n_embd * n_ff * weight_bytes;
        let expert_bytes = ffn(model.n_ff);
        Some(Geometry {
            expert_bytes,
            n_granules: (expert_bytes >> 20).clamp(1, N_GRANULES_MAX),
            attention_bytes: model.attention * weight_bytes,
            shared_bytes: ffn(model.n_ff_shared),
            head_bytes: model.n_vocab * model.n_embd * weight_bytes,
            weight_bytes: weight_bytes as f64,
        })
    }

    pub fn with_granules(self, n_granules: usize) -> Geometry {
        assert!(n_granules > 0);
        Geometry { n_granules, ..self }
    }

    /// Room for one granule, of which the last may be shorter.
    pub fn slot_bytes(&self) -> usize {
        self.expert_bytes.div_ceil(self.n_granules)
    }

    /// The needs of a tier for layers with so many experts, of which a token uses `k`.
    pub fn needs(&self, n_experts: &[usize], k: usize) -> Needs {
        let layer = |&n_experts: &usize| {
            (n_experts > 0).then(|| LayerNeeds {
                n_experts,
                n_granules: self.n_granules,
                k: k.min(n_experts),
                slot_bytes: self.slot_bytes(),
                staging_bytes: 0,
            })
        };
        Needs(n_experts.iter().map(layer).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PreScope, Table 2, in MiB.
    #[test]
    fn experts_are_as_large_as_published() {
        let mib = |name| Geometry::published(name).unwrap().expert_bytes as f64 / (1 << 20) as f64;
        assert_eq!(mib("mixtral-8x7b"), 336.0);
        assert_eq!(mib("qwen3-30b-a3b"), 9.0);
        assert_eq!(mib("qwen1.5-moe"), 16.5);
        assert_eq!(mib("deepseek-v2-lite"), mib("moonlight-16b-a3b"));
        assert_eq!(Geometry::published("unknown"), None);
    }

    #[test]
    fn granules_cover_an_expert_and_are_not_small() {
        for name in Geometry::names() {
            let geometry = Geometry::published(name).unwrap();
            assert!(geometry.slot_bytes() >= 1 << 20);
            for n in [1, 3, 7, 16] {
                let cut = geometry.with_granules(n);
                assert!(n * cut.slot_bytes() >= cut.expert_bytes);
                assert!(n * cut.slot_bytes() < cut.expert_bytes + n);
            }
        }
    }

    #[test]
    fn a_budget_is_planned_as_the_engine_plans_it() {
        let geometry = Geometry::published("qwen3-30b-a3b").unwrap();
        let needs = geometry.needs(&[0, 16, 16], 4);
        let expert = (geometry.n_granules * geometry.slot_bytes()) as u64;
        assert_eq!(needs.all_bytes(), 32 * expert);
        assert_eq!(needs.minimum_bytes(), 5 * expert);
        let plan = needs.plan(needs.all_bytes() / 2);
        assert_eq!(plan.classes[0].n_slots, 16 * geometry.n_granules);
        assert_eq!(plan.layers[0].n_experts, 0);
    }
}
