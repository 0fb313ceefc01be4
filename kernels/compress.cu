// Attention to a window and to compressed rows (DeepSeek-V4): these rows, and all rows that a token
// sees, side by side.
//
//   keep_rows      a text's last rows and their scores, for blocks to come
//   compress_rows  the compressed rows of blocks that are whole: mean, norm, rotation
//   gather_seen    each token's window, and its blocks' compressed rows
//
// Twins: `CpuPass::compress` and `gathered` of src/forward/compressed.rs and `compress_rows` of
// src/backend/cpu/compress.rs, to the bit.
//
// Memory traffic: a block's rows and scores twice, the second time from L1 or L2; what is gathered
// once each way.
#include "exp.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 GATHER_THREADS = 128;

struct CompressParams {
    // [tokens, width] each: rows and their scores
    Address<const float> values;
    Address<const float> scores;
    // [2, n_kept, width]: rows of positions before these and their scores, each at its position's
    // remainder by n_kept
    Address<float> kept;
    // [ratio, width]: added to scores, by a position's place in its block
    Address<const float> places;
    // [dim]: of the norm
    Address<const float> weight;
    // [blocks, pairs] of (cos, sin), of the positions at which blocks begin
    Address<const float2> cos_sin;
    // The first row's position is past[0] + first. `past` and `block` are in memory, so that one
    // captured graph serves every position.
    Address<const u32> past;
    // The first block is block[0] + skipped.
    Address<const u32> block;
    // [blocks, dim]
    Address<float> out;
    u32 first;
    u32 skipped;
    u32 tokens;
    u32 dim;
    // Positions of a block.
    u32 ratio;
    // Not 0 if rows have two halves: a compressed row is made of the first ones of the block before
    // and the second ones of its own.
    u32 overlaps;
    u32 pairs;
    // As in RopeParams; the last elements of a row are rotated.
    u32 adjacent;
    float eps;
    u32 unused;
};
static_assert(sizeof(CompressParams) == 112);

struct Row {
    float value, score;
};

// A text's rows, those of the launch and those kept before.
struct Text {
    Global<const float> values, scores, places;
    Global<float> kept;
    u32 past, ratio, width, n_kept;

    __device__ __forceinline__ Text(const CompressParams& p)
        : values(p.values), scores(p.scores), places(p.places), kept(p.kept), ratio(p.ratio) {
        past = p.past[0] + p.first;
        width = p.overlaps ? 2 * p.dim : p.dim;
        n_kept = p.overlaps ? 2 * ratio : ratio;
    }
    __device__ __forceinline__ u64 place(u32 position, u32 i) const {
        return static_cast<u64>(position % n_kept) * width + i;
    }
    __device__ __forceinline__ float score(u32 position, u64 at, u32 i) const {
        return scores[at] + places[static_cast<u64>(position % ratio) * width + i];
    }
    __device__ __forceinline__ Row row(u32 position, u32 i) const {
        if (position >= past) {
            u64 at = static_cast<u64>(position - past) * width + i;
            return Row{values[at], score(position, at, i)};
        }
        u64 at = place(position, i);
        return Row{kept[at], kept[static_cast<u64>(n_kept) * width + at]};
    }
};

// blockIdx.y is one of the last rows.
KERNEL(keep_rows, THREADS, CompressParams) {
    Text text(p);
    Global<float> kept = p.kept;
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, row = p.tokens - gridDim.y + blockIdx.y;
    if (i >= text.width) return;
    u32 position = text.past + row;
    u64 from = static_cast<u64>(row) * text.width + i, to = text.place(position, i);
    kept[to] = text.values[from];
    kept[static_cast<u64>(text.n_kept) * text.width + to] = text.score(position, from, i);
}

// One block for each compressed row, a thread for each of its elements. A block of positions that
// is not whole has no row.
KERNEL(compress_rows, THREADS, CompressParams) {
    SHARED_DYNAMIC(float, row);
    SHARED(float, scale, 1);
    Text text(p);
    Global<const float> weight = p.weight;
    Global<const float2> cos_sin = p.cos_sin;
    u32 dim = p.dim, pairs = p.pairs, place = p.skipped + blockIdx.x;
    u64 whole = (static_cast<u64>(p.block[0]) + place + 1) * text.ratio;
    if (whole > static_cast<u64>(text.past) + p.tokens) return;
    u32 end = static_cast<u32>(whole), begin = end - text.ratio;
    bool overlaps = p.overlaps != 0;
    u32 first = overlaps && begin > 0 ? begin - text.ratio : begin, own = overlaps ? dim : 0;
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) {
        float most = -INFINITY, sum = 0.0f, total = 0.0f;
        for (u32 position = first; position < end; position++) {
            most = fmaxf(most, text.row(position, position < begin ? i : own + i).score);
        }
        for (u32 position = first; position < end; position++) {
            Row each = text.row(position, position < begin ? i : own + i);
            float part = moeba_exp(each.score - most);
            sum += part;
            total += each.value * part;
        }
        row[i] = total / sum;
    }
    __syncthreads();
    // In the eight lanes of "One arithmetic".
    if (threadIdx.x < WARP) {
        float lane = 0.0f;
        for (u32 i = threadIdx.x; i < dim && threadIdx.x < 8; i += 8) {
            lane = fmaf(row[i], row[i], lane);
        }
        lane = tree8_threads(lane);
        if (threadIdx.x == 0) scale[0] = 1.0f / sqrtf(lane / static_cast<float>(dim) + p.eps);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) row[i] = row[i] * scale[0] * weight[i];
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        float2 turn = cos_sin[static_cast<u64>(place) * pairs + pair];
        u32 a = dim - 2 * pairs + (p.adjacent ? 2 * pair : pair), b = a + (p.adjacent ? 1 : pairs);
        float x = row[a], y = row[b];
        row[a] = x * turn.x - y * turn.y;
        row[b] = x * turn.y + y * turn.x;
    }
    __syncthreads();
    Global<float> out = p.out + static_cast<u64>(blockIdx.x) * dim;
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) out[i] = row[i];
}

struct GatherParams {
    // [n_ctx, row_words]: a text's rows
    Address<const u32> own;
    // [.., row_words]: block b's is row (b + 1) · pages - 1
    Address<const u32> blocks;
    // [tokens, (n_chosen + 1) · ratio - 1] or null: the positions of a token's blocks, ascending,
    // if it sees more than n_chosen; see index.cu
    Address<const u32> chosen;
    // The first token's position is past[0] + first.
    Address<const u32> past;
    // [tokens, n_rows, row_words]
    Address<u32> to;
    // [tokens]: the number of a token's last row
    Address<u32> last;
    u32 first;
    // No position from here on is seen.
    u32 n_ctx;
    u32 window;
    u32 ratio;
    u32 pages;
    u32 n_chosen;
    u32 n_rows;
    u32 row_words;
};
static_assert(sizeof(GatherParams) == 80);

// One warp for each row, blockIdx.y is a token.
KERNEL(gather_seen, GATHER_THREADS, GatherParams) {
    Global<const u32> own = p.own, blocks = p.blocks, chosen = p.chosen;
    u32 token = blockIdx.y, lane = threadIdx.x % WARP, row_words = p.row_words;
    u32 i = blockIdx.x * (GATHER_THREADS / WARP) + threadIdx.x / WARP;
    u32 n_seen = min(p.past[0] + p.first + token + 1, p.n_ctx), near = min(p.window, n_seen);
    u32 n_blocks = n_seen / p.ratio;
    bool chooses = chosen && n_blocks > p.n_chosen;
    u32 n = min(near + (chooses ? p.n_chosen : n_blocks), p.n_rows);
    if (i == 0 && lane == 0) p.last[token] = n - 1;
    if (i >= n) return;
    Global<const u32> from = own + static_cast<u64>(n_seen - near + i) * row_words;
    if (i >= near) {
        u32 block = i - near;
        if (chooses) {
            u32 width = (p.n_chosen + 1) * p.ratio - 1;
            block = chosen[static_cast<u64>(token) * width + block * p.ratio] / p.ratio;
        }
        from = blocks + (static_cast<u64>(block + 1) * p.pages - 1) * row_words;
    }
    Global<u32> to = p.to + (static_cast<u64>(token) * p.n_rows + i) * row_words;
    for (u32 word = lane; word < row_words; word += WARP) to[word] = from[word];
}
