//! From chosen experts to where their granules lie in device memory, on the device
//! (`kernels/slots.cu`).

use super::{Args, Device, DeviceSlice, Kernel, Launch, Stream};
use crate::Result;

const THREADS: u32 = 256;

/// Numbers of devices in tables are below this, addresses are not.
pub const HOMES: u64 = 256;

pub struct Resolve {
    resolve: Kernel,
    limit: Kernel,
    place: Kernel,
}

/// What a look-up reads and writes.
#[derive(Clone, Copy)]
pub struct Lookup<'a> {
    /// u32 [pairs], below `n_experts` or `NO_EXPERT`
    pub chosen: DeviceSlice<'a>,
    /// u64 [n_experts, n_granules]: where the layer's granules lie, 0 where they are not here
    pub table: DeviceSlice<'a>,
    pub n_experts: usize,
    pub n_granules: usize,
    /// u64 [pairs, n_granules]: the table's rows, all 0 where an expert is not whole
    pub granules: DeviceSlice<'a>,
    /// u32 [pairs], where there are several devices: which one has the pair's expert, by its number
    /// in the table in place of addresses. 0: this one, or none.
    pub homes: Option<DeviceSlice<'a>>,
    /// u32 [1]: pairs whose expert is not whole
    pub missing: DeviceSlice<'a>,
    /// u32 [1]: the number of this pass
    pub pass: DeviceSlice<'a>,
    /// u32 [1]: gets `pass` where nothing is missing, and is left as it is where something is
    pub go: DeviceSlice<'a>,
}

impl Resolve {
    pub fn load(gpu: &Device) -> Result<Resolve> {
        Ok(Resolve {
            resolve: gpu.kernel("resolve_slots")?,
            limit: gpu.kernel("limit_experts")?,
            place: gpu.kernel("place_rows")?,
        })
    }

    /// Looks the chosen experts up.
    ///
    /// # Panics
    /// If sizes do not fit each other.
    ///
    /// # Safety
    /// When the launch runs, the ids in `chosen` are below `n_experts` or `NO_EXPERT`.
    pub unsafe fn launch(&self, stream: &Stream, lookup: &Lookup) -> Result<()> {
        let (pairs, n_granules) = (lookup.chosen.count::<u32>(), lookup.n_granules);
        assert!(n_granules > 0 && lookup.n_experts > 0, "no expert is made of nothing");
        assert_eq!(lookup.table.count::<u64>(), lookup.n_experts * n_granules);
        assert_eq!(lookup.granules.count::<u64>(), pairs * n_granules);
        assert!(lookup.homes.is_none_or(|homes| homes.count::<u32>() == pairs));
        for word in [lookup.missing, lookup.pass, lookup.go] {
            assert_eq!(word.count::<u32>(), 1);
        }
        let args = Args::new().slice(lookup.chosen).size(pairs);
        let args = args.slice(lookup.table).size(n_granules).slice(lookup.granules);
        let args =
            args.optional(lookup.homes).slice(lookup.missing).slice(lookup.pass).slice(lookup.go);
        let (grid, block) = ([1, 1, 1], [THREADS, 1, 1]);
        let launch = Launch { kernel: self.resolve, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's, and sizes are asserted; ids are the caller's
        // promise.
        unsafe { stream.launch(&launch) }
    }

    /// What other devices have computed goes among this one's sums: `partial[pair]` of f32
    /// [pairs, n_embd] becomes `rows[homes[pair] − 1, pair]` where the home is not 0. `rows` is f32
    /// [devices but this one, pairs, n_embd].
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
        let args = Args::new().slice(homes).slice(rows).size(n_embd).slice(partial);
        let grid = [(n_embd as u32).div_ceil(THREADS), pairs as u32, 1];
        let (kernel, block) = (self.place, [THREADS, 1, 1]);
        let launch = Launch { kernel, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's, sizes are asserted; `homes` are the caller's
        // promise.
        unsafe { stream.launch(&launch) }
    }

    /// Leaves each expert to the first `capacity` tokens that have chosen it; the others get
    /// `NO_EXPERT` (`Route::limit` on the CPU). `chosen` is u32 [pairs].
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
        let args = Args::new().slice(chosen).size(pairs).size(capacity.min(pairs));
        let (grid, block) = ([n_experts as u32, 1, 1], [32, 1, 1]);
        let launch = Launch { kernel: self.limit, grid, block, shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's, and sizes are asserted.
        unsafe { stream.launch(&launch) }
    }
}
