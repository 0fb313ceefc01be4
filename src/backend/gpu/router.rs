//! Which experts a token goes to (`kernels/router.cu`); twin in `cpu::router`.

use super::{Args, Device, DeviceSlice, Kernel, Launch, Stream};
use crate::Result;
use crate::backend::ops::{Choice, Score};

/// A thread of the warp notes which of its experts are chosen in the bits of a word.
const EXPERTS_MAX: usize = 1024;

pub struct Router(Kernel);

/// Where a route is read and written; shapes as of `cpu::router::Route`.
#[derive(Clone, Copy)]
pub struct DeviceRoute<'a> {
    pub k: usize,
    pub n_experts: usize,
    /// f32 [tokens, n_experts]: logits before, probabilities after
    pub probs: DeviceSlice<'a>,
    /// u32 [tokens, k], best first
    pub chosen: DeviceSlice<'a>,
    /// f32 [tokens, k]
    pub weights: DeviceSlice<'a>,
}

impl Router {
    pub fn load(gpu: &Device) -> Result<Router> {
        Ok(Router(gpu.kernel("route")?))
    }

    /// Turns logits into probabilities, the `k` best experts and their weights. `bias` is f32
    /// [n_experts].
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn route(
        &self,
        stream: &Stream,
        route: DeviceRoute,
        choice: &Choice,
        bias: Option<DeviceSlice>,
    ) -> Result<()> {
        let (n, k, groups) = (route.n_experts, route.k, choice.n_groups);
        assert!(k <= n && n <= EXPERTS_MAX, "{k} of {n} experts");
        assert!(n.is_multiple_of(groups) && choice.n_groups_used <= groups, "{groups} groups");
        let tokens = route.probs.count::<f32>() / n;
        assert_eq!(route.probs.count::<f32>(), tokens * n);
        assert_eq!(route.chosen.count::<u32>(), tokens * k);
        assert_eq!(route.weights.count::<f32>(), tokens * k);
        assert!(bias.is_none_or(|bias| bias.count::<f32>() == n), "a bias an expert");
        if tokens == 0 || k == 0 {
            return Ok(());
        }
        let score = match choice.score {
            Score::Softmax | Score::SoftmaxChosen => 0,
            Score::Sigmoid => 1,
            Score::SparseMixer => 2,
        };
        let args = Args::new().slice(route.probs).optional(bias).slice(route.chosen);
        let args = args.slice(route.weights).size(n).size(k).u32(score);
        let args = args.u32(u32::from(choice.normalizes())).f32(choice.scale);
        let args = args.size(groups).size(choice.n_groups_used).f32(choice.jitter);
        let shared_bytes = 4 * (2 * n + groups + k) as u32;
        let (grid, block) = ([tokens as u32, 1, 1], [32, 1, 1]);
        let launch = Launch { kernel: self.0, grid, block, shared_bytes, args: &args };
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&launch) }
    }
}
