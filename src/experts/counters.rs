//! What the cache did.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    pub hits_whole: u64,
    pub hits_partial: u64,
    pub misses: u64,
    pub demand_bytes: u64,
    pub prefetch_used_bytes: u64,
    pub prefetch_wasted_bytes: u64,
    pub prefetch_pending_bytes: u64,
    pub read_bytes: u64,
    pub busy_ns: u64,
    pub stall_ns: u64,
    pub resident_bytes: u64,
    pub resident_bytes_max: u64,
    pub n_reads: u64,
    pub demand_wait_histogram: [u64; 6],
}
