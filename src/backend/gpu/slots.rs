//! The look-up of chosen experts' granules in device memory, on the device (`kernels/slots.cu`).

use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;

const THREADS: u32 = 256;

/// In tables, numbers of devices are below this; addresses are not.
pub const HOMES: u64 = 256;

kernel_params! {
    pub struct ResolveParams[136] {
        chosen: DevicePtr,
        table: DevicePtr,
        granules: DevicePtr,
        homes: DevicePtr,
        missing: DevicePtr,
        pass: DevicePtr,
        go: DevicePtr,
        pairs: u32,
        n_granules: u32,
        route: DevicePtr,
        h: DevicePtr,
        x: DevicePtr,
        latent: DevicePtr,
        to: DevicePtr,
        missing_at: u32,
        h_at: u32,
        x_at: u32,
        latent_at: u32,
        route_words: u32,
        row_words: u32,
        latent_words: u32,
        unused: u32,
    }
}

kernel_params! {
    pub struct LimitParams[16] {
        chosen: DevicePtr,
        pairs: u32,
        capacity: u32,
    }
}

kernel_params! {
    pub struct PlaceRowsParams[32] {
        homes: DevicePtr,
        rows: DevicePtr,
        partial: DevicePtr,
        n_embd: u32,
        unused: u32,
    }
}

kernels! {
    pub struct Resolve {
        resolve: ResolveParams = "resolve_slots",
        limit: LimitParams = "limit_experts",
        place: PlaceRowsParams = "place_rows",
    }
}

/// The device memory that a look-up reads and writes.
#[derive(Clone, Copy)]
pub struct Lookup<'a> {
    /// u32 `[pairs]`, below `n_experts` or `NO_EXPERT`
    pub chosen: DeviceSlice<'a>,
    /// u64 [n_experts, n_granules]: the addresses of the layer's granules, 0 for those that are not
    /// on this device
    pub table: DeviceSlice<'a>,
    pub n_experts: usize,
    pub n_granules: usize,
    /// u64 [pairs, n_granules]: the table's rows, zeros if an expert is not whole
    pub granules: DeviceSlice<'a>,
    /// u32 `[pairs]`, if there are several devices: the number of the device that has the pair's
    /// expert, which the table holds in place of addresses. 0: this one, or none.
    pub homes: Option<DeviceSlice<'a>>,
    /// u32 `[1]`: pairs whose expert is not whole
    pub missing: DeviceSlice<'a>,
    /// u32 `[1]`: the number of this pass; may be mapped memory of the host, as `go`
    pub pass: DeviceSlice<'a>,
    /// u32 `[1]`: gets `pass` if nothing is missing, and keeps its value otherwise
    pub go: DeviceSlice<'a>,
}

/// A token's routing for the host, and what else the host may want.
#[derive(Clone, Copy)]
pub struct Post<'a> {
    /// The memory of the look-up's `missing` and `chosen`, and what lies beside them.
    pub route: DeviceSlice<'a>,
    /// The router's input and the residual stream, of one size.
    pub rows: Option<[DeviceSlice<'a>; 2]>,
    /// The input of narrow experts.
    pub latent: Option<DeviceSlice<'a>>,
    /// Mapped memory, and the offsets of `rows` and `latent` in it.
    pub to: DeviceSlice<'a>,
    pub at: [usize; 3],
}

fn with_post(params: ResolveParams, missing: DeviceSlice, post: &Post) -> ResolveParams {
    let route_words = post.route.count::<u32>();
    let [h, x] = post.rows.unwrap_or([post.route.slice(0..0); 2]);
    let latent_words = post.latent.map_or(0, |latent| latent.count::<u32>());
    let (row_words, [h_at, x_at, latent_at]) = (h.count::<u32>(), post.at);
    assert_eq!(x.count::<u32>(), row_words);
    let missing_at = missing.address().checked_sub(post.route.address()).map(|at| at as usize);
    let missing_at = missing_at.filter(|at| *at < 4 * route_words).expect("a part of the route");
    let rows = [(row_words, h_at), (row_words, x_at), (latent_words, latent_at)];
    let all = [(route_words, 0)].into_iter().chain(rows);
    let mut all = all.filter(|(n, _)| *n > 0);
    assert!(all.all(|(n, at)| n * 4 + at <= post.to.len() && at.is_multiple_of(4)));
    ResolveParams {
        route: post.route.into(),
        h: h.into(),
        x: x.into(),
        latent: post.latent.into(),
        to: post.to.into(),
        missing_at: u32_of(missing_at / 4),
        h_at: u32_of(h_at / 4),
        x_at: u32_of(x_at / 4),
        latent_at: u32_of(latent_at / 4),
        route_words: u32_of(route_words),
        row_words: u32_of(row_words),
        latent_words: u32_of(latent_words),
        ..params
    }
}

impl Resolve {
    /// Looks the chosen experts up, and stores the routing in memory of the host if it is posted.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, the ids in `chosen` are below `n_experts` or `NO_EXPERT`.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        lookup: &Lookup,
        post: Option<&Post>,
    ) -> Result<()> {
        let (pairs, n_granules) = (lookup.chosen.count::<u32>(), lookup.n_granules);
        assert!(n_granules > 0 && lookup.n_experts > 0, "no expert is made of nothing");
        assert_eq!(lookup.table.count::<u64>(), lookup.n_experts * n_granules);
        assert_eq!(lookup.granules.count::<u64>(), pairs * n_granules);
        assert!(lookup.homes.is_none_or(|homes| homes.count::<u32>() == pairs));
        for word in [lookup.missing, lookup.pass, lookup.go] {
            assert_eq!(word.count::<u32>(), 1);
        }
        let params = ResolveParams {
            chosen: lookup.chosen.into(),
            table: lookup.table.into(),
            granules: lookup.granules.into(),
            homes: lookup.homes.into(),
            missing: lookup.missing.into(),
            pass: lookup.pass.into(),
            go: lookup.go.into(),
            pairs: u32_of(pairs),
            n_granules: u32_of(n_granules),
            ..Default::default()
        };
        let params = post.map_or(params, |post| with_post(params, lookup.missing, post));
        let blocks = 1 + (2 * params.row_words + params.latent_words).div_ceil(THREADS);
        // SAFETY: sizes are asserted; the ids are the caller's promise.
        unsafe { stream.launch(self.resolve, Grid::new([blocks, 1, 1], THREADS), &params) }
    }

    /// Copies the sums of other devices among this one's: `partial[pair]` of f32 [pairs, n_embd]
    /// becomes `rows[homes[pair] − 1, pair]` where the home is not 0. `rows` is f32 [devices other
    /// than this one, pairs, n_embd].
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, `homes` are 0 or numbers of those devices, counted from 1.
    pub unsafe fn place_rows(
        &self,
        stream: &Stream,
        homes: DeviceSlice,
        rows: DeviceSlice,
        n_embd: usize,
        partial: DeviceSlice,
    ) -> Result<()> {
        let pairs = homes.count::<u32>();
        assert_eq!(partial.count::<f32>(), pairs * n_embd);
        assert!(rows.count::<f32>().is_multiple_of((pairs * n_embd).max(1)));
        if pairs * n_embd == 0 {
            return Ok(());
        }
        let params = PlaceRowsParams {
            homes: homes.into(),
            rows: rows.into(),
            partial: partial.into(),
            n_embd: u32_of(n_embd),
            unused: 0,
        };
        let blocks = [params.n_embd.div_ceil(THREADS), u32_of(pairs), 1];
        // SAFETY: sizes are asserted; `homes` are the caller's promise.
        unsafe { stream.launch(self.place, Grid::new(blocks, THREADS), &params) }
    }

    /// Each expert keeps the first `capacity` tokens that have chosen it; the others get
    /// `NO_EXPERT` (`Route::limit` on the CPU). `chosen` is u32 `[pairs]`.
    pub fn limit(
        &self,
        stream: &Stream,
        chosen: DeviceSlice,
        n_experts: usize,
        capacity: usize,
    ) -> Result<()> {
        let pairs = chosen.count::<u32>();
        if pairs == 0 || n_experts == 0 {
            return Ok(());
        }
        let capacity = u32_of(capacity.min(pairs));
        let params = LimitParams { chosen: chosen.into(), pairs: u32_of(pairs), capacity };
        // SAFETY: the slice has so many pairs.
        unsafe { stream.launch(self.limit, Grid::new([u32_of(n_experts), 1, 1], 32), &params) }
    }
}
