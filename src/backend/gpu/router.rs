//! The choice of each token's experts (`kernels/router.cu`). Twin: `cpu::router`.

use super::{Device, DevicePtr, DeviceSlice, Grid, Kernel, Stream, kernel_params, u32_of};
use crate::Result;
use crate::backend::ops::{Choice, Score};

/// A thread of the warp marks its chosen experts in the bits of a word.
const EXPERTS_MAX: usize = 1024;

kernel_params! {
    pub struct RouteParams[80] {
        probs: DevicePtr,
        bias: DevicePtr,
        scales: DevicePtr,
        chosen: DevicePtr,
        weights: DevicePtr,
        n: u32,
        k: u32,
        score: u32,
        normalize: u32,
        scale: f32,
        n_groups: u32,
        n_groups_used: u32,
        jitter: f32,
        cap: f32,
        unused: u32,
    }
}

pub struct Router(Kernel<RouteParams>);

/// The device memory of a route; shapes as in `cpu::router::Route`.
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

/// A router's factors and biases of each expert: f32 [n_experts].
#[derive(Clone, Copy, Default)]
pub struct RouteVectors<'a> {
    /// Added to the probabilities to choose by.
    pub bias: Option<DeviceSlice<'a>>,
    /// Factors on the chosen experts' weights.
    pub scales: Option<DeviceSlice<'a>>,
}

impl Router {
    pub fn load(gpu: &Device) -> Result<Router> {
        Ok(Router(Kernel::find(gpu, "route")?))
    }

    /// Turns logits into probabilities, the `k` best experts and their weights.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn route(
        &self,
        stream: &Stream,
        route: DeviceRoute,
        choice: &Choice,
        RouteVectors { bias, scales }: RouteVectors,
    ) -> Result<()> {
        let (n, k, groups) = (route.n_experts, route.k, choice.n_groups);
        assert!(k <= n && n <= EXPERTS_MAX, "{k} of {n} experts");
        assert!(n.is_multiple_of(groups) && choice.n_groups_used <= groups, "{groups} groups");
        let tokens = route.probs.count::<f32>() / n;
        assert_eq!(route.probs.count::<f32>(), tokens * n);
        assert_eq!(route.chosen.count::<u32>(), tokens * k);
        assert_eq!(route.weights.count::<f32>(), tokens * k);
        let is_whole = |v: Option<DeviceSlice>| v.is_none_or(|v| v.count::<f32>() == n);
        assert!(is_whole(bias) && is_whole(scales), "a bias and a factor an expert");
        if tokens == 0 || k == 0 {
            return Ok(());
        }
        let score = match choice.score {
            Score::Softmax | Score::SoftmaxChosen => 0,
            Score::Sigmoid => 1,
            Score::SparseMixer => 2,
            Score::SqrtSoftplus => unreachable!("{:?} is computed on the CPU", choice.score),
        };
        let params = RouteParams {
            probs: route.probs.into(),
            bias: bias.into(),
            scales: scales.into(),
            chosen: route.chosen.into(),
            weights: route.weights.into(),
            n: u32_of(n),
            k: u32_of(k),
            score,
            normalize: choice.normalizes().into(),
            scale: choice.scale,
            n_groups: u32_of(groups),
            n_groups_used: u32_of(choice.n_groups_used),
            jitter: choice.jitter,
            cap: choice.cap,
            unused: 0,
        };
        let grid = Grid::new([u32_of(tokens), 1, 1], 32).with_shared(4 * (2 * n + groups + k));
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.0, grid, &params) }
    }
}
