// Looks up, on the device, where the granules of the chosen experts lie in device memory. The host
// takes no part.
//
// One block looks up: 64 tokens of 64 experts are 4096 pairs, a few loads for each of its threads.
// The table of 512 experts with 8 granules is 32 KB.
#include "moeba.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 NONE = 0xffffffffu;
// No address is so low.
static constexpr u64 HOMES = 256;

struct ResolveParams {
    // [pairs] = [tokens, k]; NONE where a token has no expert at that rank
    Address<const u32> chosen;
    // [experts, n_granules] of this layer: a granule's address, 0 if it is not on this device
    Address<const u64> table;
    // [pairs, n_granules]: the table's row of the pair's expert, zeros unless the expert is whole
    Address<u64> granules;
    // [pairs], or null if one device computes. If an expert is whole on another device, the table
    // holds that device's number, below HOMES, in place of each address. Such an expert is not
    // missing: its granules are zeros here, and `homes` gets the number. It gets 0 otherwise.
    Address<u32> homes;
    // The number of pairs whose expert is not whole.
    Address<u32> missing;
    // The number of this pass; memory of the host may hold it.
    Address<const u32> pass;
    // Gets `pass` if nothing is missing. A stream waits for it (`Stream::wait_value`); if something
    // is missing, another stream writes it later. It may be memory of the host.
    Address<u32> go;
    u32 pairs;
    u32 n_granules;
    // [route_words], of which `chosen` is a part, and `missing` at this word
    Address<const u32> route;
    // [row_words] each
    Address<const u32> h;
    Address<const u32> x;
    // [latent_words]
    Address<const u32> latent;
    // Mapped memory of the host: gets the route, and the others from these words on. No copy engine
    // takes part.
    Address<u32> to;
    u32 missing_at;
    u32 h_at;
    u32 x_at;
    u32 latent_at;
    u32 route_words;
    u32 row_words;
    u32 latent_words;
    u32 unused;
};
static_assert(sizeof(ResolveParams) == 136);

// The router's input, the residual stream and the input of narrow experts for the host. One thread
// for each word; a warp writes 128 bytes side by side.
__device__ __forceinline__ void post_rows(const ResolveParams& p) {
    Global<u32> to = p.to;
    u32 i = (blockIdx.x - 1) * blockDim.x + threadIdx.x;
    if (i < p.row_words) {
        to[p.h_at + i] = p.h[i];
    } else if (i < 2 * p.row_words) {
        i -= p.row_words;
        to[p.x_at + i] = p.x[i];
    } else if (i < 2 * p.row_words + p.latent_words) {
        i -= 2 * p.row_words;
        to[p.latent_at + i] = p.latent[i];
    }
}

// The first block looks up and stores the route for the host, the others the rows.
KERNEL(resolve_slots, THREADS, ResolveParams) {
    SHARED(u32, partial, THREADS / WARP);
    if (blockIdx.x > 0) {
        post_rows(p);
        return;
    }
    Global<const u32> chosen = p.chosen;
    Global<u64> granules = p.granules;
    Global<u32> homes = p.homes;
    u32 n_granules = p.n_granules, own = 0, pass = 0;
    // Asked for first: it may come from the host.
    if (threadIdx.x == 0) pass = *p.pass;
    for (u32 pair = threadIdx.x; pair < p.pairs; pair += blockDim.x) {
        u32 expert = chosen[pair];
        bool whole = expert != NONE;
        Global<const u64> row = p.table + (whole ? static_cast<u64>(expert) : 0) * n_granules;
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
    u32 sum = 0;
    for (u32 warp = 0; warp < blockDim.x / WARP; warp++) sum += partial[warp];
    for (u32 i = threadIdx.x; i < p.route_words; i += blockDim.x) {
        u32 word = sum;
        if (i != p.missing_at) word = p.route[i];
        p.to[i] = word;
    }
    if (threadIdx.x != 0) return;
    *p.missing = sum;
    if (sum != 0) return;
    // The engine that waits for the word may be another than the one that runs kernels.
    __threadfence_system();
    *p.go = pass;
}

struct LimitParams {
    // [pairs]
    Address<u32> chosen;
    u32 pairs;
    u32 capacity;
};
static_assert(sizeof(LimitParams) == 16);

// Each expert keeps the first `capacity` pairs that chose it, in order; the others get NONE. Twin:
// `Route::limit` of src/backend/cpu/router.rs. One warp for each expert: warps write only pairs of
// their own expert.
KERNEL(limit_experts, WARP, LimitParams) {
    Global<u32> chosen = p.chosen;
    u32 expert = blockIdx.x, lane = threadIdx.x, taken = 0;
    for (u32 first = 0; first < p.pairs; first += WARP) {
        u32 pair = first + lane;
        bool own = pair < p.pairs && chosen[pair] == expert;
        u32 all = __ballot_sync(FULL_WARP, own);
        if (own && taken + __popc(all & ((1u << lane) - 1)) >= p.capacity) chosen[pair] = NONE;
        taken += __popc(all);
    }
}

struct PlaceRowsParams {
    // [pairs]
    Address<const u32> homes;
    // [devices other than this, pairs, n_embd]
    Address<const float> rows;
    // [pairs, n_embd]
    Address<float> partial;
    u32 n_embd;
    u32 unused;
};
static_assert(sizeof(PlaceRowsParams) == 32);

// Copies the sums of granules that other devices have computed among this one's:
//
//   partial[pair] = rows[homes[pair] - 1, pair]       where homes[pair] is not 0
//
// One thread for each value, which is read once and written once.
KERNEL(place_rows, THREADS, PlaceRowsParams) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, pair = blockIdx.y;
    u32 home = p.homes[pair];
    if (i >= p.n_embd || home == 0) return;
    u64 of_device = static_cast<u64>(gridDim.y) * p.n_embd;
    u64 to = static_cast<u64>(pair) * p.n_embd + i;
    p.partial[to] = p.rows[(home - 1) * of_device + to];
}
