//! The choice of each token's experts (`kernels/router.cu`). Twin: `cpu::router`.

use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::backend::ops::{Choice, Score};

/// A thread of the warp marks its chosen experts in the bits of a word.
const EXPERTS_MAX: usize = 1024;
/// Threads of a block of `group_route`.
const GROUP_THREADS: u32 = 128;

kernel_params! {
    pub struct RouteParams[96] {
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
        bias_on_logits: u32,
        fixed: DevicePtr,
        ids: DevicePtr,
    }
}

kernel_params! {
    pub struct GroupParams[80] {
        probs: DevicePtr,
        chosen: DevicePtr,
        table: DevicePtr,
        groups: DevicePtr,
        weights: DevicePtr,
        granules: DevicePtr,
        tokens: u32,
        n: u32,
        n_chosen: u32,
        k: u32,
        size: u32,
        n_granules: u32,
        scale: f32,
        unused: u32,
    }
}

kernels! {
    pub struct Router {
        route: RouteParams = "route",
        group: GroupParams = "group_route",
    }
}

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

/// A router's factors and biases of each expert: f32 `[n_experts]`.
#[derive(Clone, Copy, Default)]
pub struct RouteVectors<'a> {
    /// Added to the probabilities to choose by.
    pub bias: Option<DeviceSlice<'a>>,
    /// Factors on the chosen experts' weights.
    pub scales: Option<DeviceSlice<'a>>,
}

/// Experts that a router's tokens go to, whatever the logits.
#[derive(Clone, Copy)]
pub struct FixedExperts<'a> {
    /// u32 [vocabulary, k]
    pub table: DeviceSlice<'a>,
    /// u32 `[tokens]`: rows of the table
    pub ids: DeviceSlice<'a>,
}

/// The groups of each token's `k` best experts, a group being `size` neighbouring ones. Each group
/// has an expert of its own.
#[derive(Clone, Copy)]
pub struct Groups<'a> {
    pub k: usize,
    pub size: usize,
    /// Factor on the weights, whose sum is 1 before.
    pub scale: f32,
    /// u64 [groups, n_granules]: the addresses of the groups' experts
    pub table: DeviceSlice<'a>,
    pub n_granules: usize,
    /// u32 [tokens, k]
    pub groups: DeviceSlice<'a>,
    /// f32 [tokens, k]
    pub weights: DeviceSlice<'a>,
    /// u64 [tokens, k, n_granules]: the rows of `table`
    pub granules: DeviceSlice<'a>,
}

impl Router {
    /// Turns logits into probabilities, the `k` best experts and their weights.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    pub fn route(
        &self,
        stream: &Stream,
        route: DeviceRoute,
        choice: &Choice,
        vectors: RouteVectors,
    ) -> Result<()> {
        // SAFETY: no experts are given.
        unsafe { self.launch(stream, route, choice, vectors, None) }
    }

    /// Routes to experts that are given, instead of the best.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `fixed.ids` are rows of its table, which has experts below
    /// `n_experts`.
    pub unsafe fn route_to(
        &self,
        stream: &Stream,
        route: DeviceRoute,
        choice: &Choice,
        vectors: RouteVectors,
        fixed: FixedExperts,
    ) -> Result<()> {
        assert!(choice.score != Score::SparseMixer, "it weighs as it chooses");
        assert!(vectors.bias.is_none(), "experts are given, and a bias chooses none");
        let tokens = route.probs.count::<f32>() / route.n_experts;
        assert_eq!(fixed.ids.count::<u32>(), tokens);
        assert!(fixed.table.count::<u32>().is_multiple_of(route.k), "a table's rows");
        // SAFETY: the caller's promise, passed on.
        unsafe { self.launch(stream, route, choice, vectors, Some(fixed)) }
    }

    /// # Safety
    /// As `route_to`.
    unsafe fn launch(
        &self,
        stream: &Stream,
        route: DeviceRoute,
        choice: &Choice,
        RouteVectors { bias, scales }: RouteVectors,
        fixed: Option<FixedExperts>,
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
            Score::SqrtSoftplus => 3,
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
            bias_on_logits: (choice.bias_on_logits && bias.is_some()).into(),
            fixed: fixed.map(|fixed| fixed.table).into(),
            ids: fixed.map(|fixed| fixed.ids).into(),
        };
        let grid = Grid::new([u32_of(tokens), 1, 1], 32).with_shared(4 * (2 * n + groups + k));
        // SAFETY: sizes are asserted; given experts are the caller's promise.
        unsafe { stream.launch(self.route, grid, &params) }
    }

    /// The groups of a route's experts, their weights, and where their experts lie.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `route` holds the result of [`Router::route`], whose experts all have
    /// groups.
    pub unsafe fn group(&self, stream: &Stream, route: DeviceRoute, to: Groups) -> Result<()> {
        let (n, n_chosen, k) = (route.n_experts, route.k, to.k);
        let tokens = route.probs.count::<f32>() / n;
        assert!(k <= n_chosen && to.size > 0 && to.n_granules > 0, "{k} of {n_chosen} experts");
        assert_eq!(route.chosen.count::<u32>(), tokens * n_chosen);
        assert_eq!(to.table.count::<u64>(), n / to.size * to.n_granules);
        assert_eq!([to.groups, to.weights].map(|slice| slice.count::<u32>()), [tokens * k; 2]);
        assert_eq!(to.granules.count::<u64>(), tokens * k * to.n_granules);
        if tokens == 0 {
            return Ok(());
        }
        let params = GroupParams {
            probs: route.probs.into(),
            chosen: route.chosen.into(),
            table: to.table.into(),
            groups: to.groups.into(),
            weights: to.weights.into(),
            granules: to.granules.into(),
            tokens: u32_of(tokens),
            n: u32_of(n),
            n_chosen: u32_of(n_chosen),
            k: u32_of(k),
            size: u32_of(to.size),
            n_granules: u32_of(to.n_granules),
            scale: to.scale,
            unused: 0,
        };
        // SAFETY: sizes are asserted; the experts' numbers are the caller's promise.
        unsafe { stream.launch(self.group, Grid::each(tokens, GROUP_THREADS), &params) }
    }
}
