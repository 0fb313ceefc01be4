// From the experts that tokens chose to where their granules lie in device memory, without the
// host.
//
//   chosen     u32 [pairs] = [tokens, k]; NONE where a token has no expert at that rank
//   table      u64 [experts, n_granules] of this layer: a granule's address, 0 where it is not here
//   granules   u64 [pairs, n_granules]: the table's row of the pair's expert, 0s unless it is whole
//   homes      u32 [pairs]; null where one device computes. The table then has, of an expert that
//              is whole on another device, that device's number, below HOMES, in place of each
//              address: it is not missing, its granules are 0s here, and the number comes here; 0
//              everywhere else
//   missing    u32: pairs whose expert is not whole
//   pass       u32: the number of this pass
//   go         u32: gets `pass` where nothing is missing. A stream waits for it
//              (`Stream::wait_value`); where something is missing, the host writes it later.
//
// One block: 64 tokens of 64 experts are 4096 pairs, a few loads for each of its threads. The table
// of 512 experts with 8 granules is 32 KB.
#include "moeba.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 NONE = 0xffffffffu;
// No address is so low.
static constexpr u64 HOMES = 256;

KERNEL(resolve_slots, THREADS, Global<const u32> chosen, u32 pairs, Global<const u64> table,
       u32 n_granules, Global<u64> granules, Global<u32> homes, Global<u32> missing,
       Global<const u32> pass, Global<u32> go) {
    SHARED(u32, partial, THREADS / WARP);
    u32 own = 0;
    for (u32 pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        u32 expert = chosen[pair];
        bool whole = expert != NONE;
        Global<const u64> row = table + (whole ? static_cast<u64>(expert) : 0) * n_granules;
        for (u32 g = 0; g < n_granules && whole; g++) whole = row[g] != 0;
        bool here = whole;
        if (homes) {
            u64 first = 0;
            if (whole) first = row[0];
            here = first >= HOMES;
            homes[pair] = here ? 0 : static_cast<u32>(first);
        }
        for (u32 g = 0; g < n_granules; g++) {
            u64 address = 0;
            if (here) address = row[g];
            granules[static_cast<u64>(pair) * n_granules + g] = address;
        }
        own += expert != NONE && !whole;
    }
    own = warp_sum(own);
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = own;
    __syncthreads();
    if (threadIdx.x != 0) return;
    u32 sum = 0;
    for (u32 warp = 0; warp < blockDim.x / WARP; warp++) sum += partial[warp];
    *missing = sum;
    if (sum != 0) return;
    // What waits for the word may be another engine of the device than the one that runs kernels.
    __threadfence_system();
    *go = *pass;
}

// Leaves each expert to the first `capacity` pairs that chose it, in order; the others have none.
// Twin: `Route::limit` of src/backend/cpu/router.rs. A warp an expert. Others meanwhile take pairs
// of theirs away, which are none of this one's before or after.
KERNEL(limit_experts, WARP, Global<u32> chosen, u32 pairs, u32 capacity) {
    u32 expert = blockIdx.x, lane = threadIdx.x, taken = 0;
    for (u32 first = 0; first < pairs; first += WARP) {
        u32 pair = first + lane;
        bool own = pair < pairs && chosen[pair] == expert;
        u32 all = __ballot_sync(FULL_WARP, own);
        if (own && taken + __popc(all & ((1u << lane) - 1)) >= capacity) chosen[pair] = NONE;
        taken += __popc(all);
    }
}

// Sums of granules that other devices have computed go among this one's:
//
//   partial[pair] = rows[homes[pair] - 1, pair]       where homes[pair] is not 0
//
// `rows` is [devices but this, pairs, n_embd], `partial` [pairs, n_embd]. A thread a value: each is
// read once and written once.
KERNEL(place_rows, THREADS, Global<const u32> homes, Global<const float> rows, u32 n_embd,
       Global<float> partial) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, pair = blockIdx.y;
    u32 home = homes[pair];
    if (i >= n_embd || home == 0) return;
    u64 of_device = static_cast<u64>(gridDim.y) * n_embd;
    u64 to = static_cast<u64>(pair) * n_embd + i;
    partial[to] = rows[(home - 1) * of_device + to];
}
