// Groups the pairs of a prompt's tokens and their experts by expert, for products of matmul.cu, on
// the device: the host takes no part.
//
// Twins: `Demand::group` and `tiles` of src/backend/ops/routing.rs; but experts come in the order
// of their numbers. Pairs of an expert keep their order.
//
// One block sorts. Each warp has a run of pairs side by side. It counts those of each expert, 32
// pairs at a time: threads whose pairs have the same expert find each other by a vote for each bit
// of its number. Then a count becomes the place behind the pairs of earlier warps, and the warps go
// over their pairs again. 4096 pairs are 8 votes of 8 bits, twice; the other tables are written on
// the way. Expected bytes: 4 a pair are read twice, from L2, and 8 written.
#include "moeba.cuh"

static constexpr u32 THREADS = 512;
static constexpr u32 WARPS = THREADS / WARP;
static constexpr u32 MAX_EXPERTS = 1024;
static constexpr u32 NONE = 0xffffffffu;
// Tokens of matmul.cu's tiles.
static constexpr u32 TILES[2] = {64, 32};

struct GroupPairsParams {
    // [tokens, k]; NONE where a token has no expert at that rank
    Address<const u32> chosen;
    // [experts, n_granules]: the addresses of the layer's granules, and a copy: the table may
    // change when the host has read the route.
    Address<const u64> table;
    Address<u64> matrices;
    // [experts + 1]: the pairs of each expert
    Address<u32> starts;
    // [pairs]: the row of input of each
    Address<u32> tokens;
    // [tokens, k]: the pair of a token and rank, or NONE
    Address<u32> places;
    // [wide, 4] and [narrow, 4]: tiles as matmul.cu reads them, and behind them some without pairs
    Address<u32> wide_tiles;
    Address<u32> narrow_tiles;
    u32 n_wide;
    u32 n_narrow;
    u32 n_pairs;
    u32 n_experts;
    u32 n_granules;
    // Pairs of a token that read one row of input.
    u32 pairs_a_row;
};
static_assert(sizeof(GroupPairsParams) == 88);

// The threads of the warp whose pairs have this expert, one bit for each.
__device__ __forceinline__ u32 same_expert(u32 expert, u32 n_bits) {
    u32 same = __ballot_sync(FULL_WARP, expert != NONE);
    for (u32 bit = 0; bit < n_bits; bit++) {
        u32 is_set = expert >> bit & 1, all = __ballot_sync(FULL_WARP, is_set);
        same &= is_set ? all : ~all;
    }
    return same;
}

// Calls take(pair, expert, same) for the pairs from `first` to `end`, 32 at a time, in all threads;
// the expert behind the last is NONE.
template <class Take>
__device__ __forceinline__ void for_pairs(const GroupPairsParams& p, u32 first, u32 end,
                                          Take take) {
    Global<const u32> chosen = p.chosen;
    u32 n_bits = 0, pair = first + threadIdx.x % WARP;
    while (p.n_experts > 1u << n_bits) n_bits++;
    u32 next = NONE;
    if (pair < end) next = chosen[pair];
    for (; first < end; first += WARP, pair += WARP) {
        u32 expert = next;
        next = NONE;
        if (pair + WARP < end) next = chosen[pair + WARP];
        take(pair, expert, same_expert(expert, n_bits));
    }
}

// The sum of the values of earlier threads of the block; `all` becomes that of all threads.
__device__ __forceinline__ u32 earlier(u32 value, Shared<u32> sums, u32& all) {
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, sum = value;
    for (u32 step = 1; step < WARP; step *= 2) {
        u32 other = __shfl_up_sync(FULL_WARP, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == WARP - 1) sums[warp] = sum;
    __syncthreads();
    all = 0;
    for (u32 w = 0; w < WARPS; w++) {
        u32 of_warp = sums[w];
        if (w < warp) sum += of_warp;
        all += of_warp;
    }
    return sum - value;
}

// Stores the tiles of an expert's pairs from tile `at` on.
__device__ __forceinline__ void store_tiles(Global<u32> tiles, u32 at, u32 size, u32 expert,
                                            u32 first, u32 n) {
    for (u32 i = 0; i < n; i += size, at++) {
        as<uint4>(tiles)[at] = make_uint4(expert, first + i, min(size, n - i), 0);
    }
}

__device__ __forceinline__ void clear_tiles(Global<u32> tiles, u32 from, u32 n) {
    for (u32 i = from + threadIdx.x; i < n; i += THREADS) {
        as<uint4>(tiles)[i] = make_uint4(0, 0, 0, 0);
    }
}

KERNEL(group_pairs, THREADS, GroupPairsParams) {
    // [warps, experts]: pairs, and then the place behind those of earlier warps
    SHARED(u16, counts, WARPS * MAX_EXPERTS);
    SHARED(u32, bases, MAX_EXPERTS);
    SHARED(u32, sums, WARPS);
    u32 n_experts = p.n_experts, n_pairs = p.n_pairs, lane = threadIdx.x % WARP;
    Global<u32> starts = p.starts, tokens = p.tokens, places = p.places;
    Global<u32> wide_tiles = p.wide_tiles, narrow_tiles = p.narrow_tiles;
    for (u32 i = threadIdx.x; i < WARPS * n_experts; i += THREADS) counts[i] = 0;
    for (u32 i = threadIdx.x; i < n_experts * p.n_granules; i += THREADS) {
        u64 address = p.table[i];
        p.matrices[i] = address;
    }
    __syncthreads();
    // The warp's pairs.
    u32 run = (n_pairs + THREADS - 1) / THREADS * WARP;
    u32 first = min(n_pairs, threadIdx.x / WARP * run), end = min(n_pairs, first + run);
    Shared<u16> own = counts + threadIdx.x / WARP * n_experts;
    for_pairs(p, first, end, [&](u32, u32 expert, u32 same) {
        bool is_first = expert != NONE && (same & ((1u << lane) - 1)) == 0;
        if (is_first) own[expert] = static_cast<u16>(own[expert] + __popc(same));
        __syncwarp();
    });
    __syncthreads();
    u32 pairs = 0, wide = 0, narrow = 0;
    for (u32 e = threadIdx.x; e - threadIdx.x < n_experts; e += THREADS) {
        u32 n = 0, all;
        for (u32 warp = 0; warp < WARPS && e < n_experts; warp++) {
            u32 of_warp = counts[warp * n_experts + e];
            counts[warp * n_experts + e] = static_cast<u16>(n);
            n += of_warp;
        }
        u32 base = pairs + earlier(n, sums, all);
        pairs += all;
        u32 wide_at = wide + earlier((n + TILES[0] - 1) / TILES[0], sums, all);
        wide += all;
        u32 narrow_at = narrow + earlier((n + TILES[1] - 1) / TILES[1], sums, all);
        narrow += all;
        if (e >= n_experts) continue;
        bases[e] = base;
        starts[e] = base;
        store_tiles(wide_tiles, wide_at, TILES[0], e, base, n);
        store_tiles(narrow_tiles, narrow_at, TILES[1], e, base, n);
    }
    if (threadIdx.x == 0) starts[n_experts] = pairs;
    clear_tiles(wide_tiles, wide, p.n_wide);
    clear_tiles(narrow_tiles, narrow, p.n_narrow);
    __syncthreads();
    for_pairs(p, first, end, [&](u32 pair, u32 expert, u32 same) {
        u32 before = __popc(same & ((1u << lane) - 1)), place = NONE;
        if (expert != NONE) {
            place = bases[expert] + own[expert] + before;
            tokens[place] = pair / p.pairs_a_row;
        }
        if (pair < end) places[pair] = place;
        __syncwarp();
        if (expert != NONE && before == 0) {
            own[expert] = static_cast<u16>(own[expert] + __popc(same));
        }
        __syncwarp();
    });
}
