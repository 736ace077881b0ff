// Paged attention of one tile of query vectors over one KV head, in splits of 256 keys at fixed absolute positions.
//
// A split is two passes: all scores, their maximum, exponentials and sum; then the values. Each pass goes over the blocks
// once: the whole tile uses a block's keys (or values) while they are in the first-level cache, and up to kMaxQueries
// queries while they are in registers. Splits are folded in order (online softmax, Milakov & Gimelshein 2018), by the
// same operations whether they were computed one after the other or by different threads.
//
// What one query computes never depends on its neighbours: a score is one accumulator over the dimensions in order, a
// column of the output one accumulator over the keys the query sees, in order. Grouping queries, blocks or columns only
// decides which of these accumulators are in registers together.
//
// State of a query, padded_dim + 16 floats: weighted sum of values [padded_dim], maximum, sum, 1 if any key was seen.

// Most queries whose accumulators are in registers together, and blocks or groups of 16 columns for N of them: enough
// chains of fused multiply-adds to hide their latency.
constexpr int kMaxQueries = kAccumulators < 6 ? kAccumulators : 6;
constexpr int beside(int n) { return kAccumulators / n > 4 ? 4 : kAccumulators / n; }
// Blocks of keys that are scored together, and how many blocks ahead memory is asked for what comes.
constexpr int kRun = 4;
constexpr int kAhead = 2;
// Scores of neighbouring queries lie a little more than a split apart, so that they do not share cache sets.
constexpr int64_t kScoreStride = kSplit + kPanel;

static inline int64_t state_size(const AttendJob* job) { return job->padded_dim + kPanel; }

// Row 2i (or 2i + 1) of a tile at columns [c, c + 16), row length `width`. Two-byte types interleave the two rows, so
// that a 32-bit lane holds both. int8 gives the integers: the scale is the caller's.
// Also asks for what lies `ahead` bytes further, where a later tile is.
template <KvType K, bool Odd> static inline VF load_row(const uint8_t* tile, int64_t i, int64_t width, int64_t c, int64_t ahead) {
    constexpr int64_t kItem = K == KvType::F32 ? 4 : K == KvType::I8 ? 1 : 2;
    const uint8_t* p = tile + (kItem == 2 ? (i * width + c) * 4 : ((2 * i + Odd) * width + c) * kItem);
    if constexpr (!Odd || kItem == 4) __builtin_prefetch(p + ahead);
    if constexpr (K == KvType::F32) return vf_load((const float*)p);
    if constexpr (K == KvType::I8) return vf_load_i8((const int8_t*)p);
    if constexpr (K == KvType::F16) return vf_load_pairs_f16<Odd>(p);
    const VI x = vi_load(p);
    return vf_bits(Odd ? vi_and(x, vi_set1((int32_t)0xffff0000u)) : vi_shl<16>(x));
}

// acc[b][n] += row_of(b) * factor(n). One row at a time: the accumulators need nearly all registers, and the compiler would hold
// several rows in the rest and move accumulators to the stack and back.
template <int N, int B, typename Row, typename Factor>
[[gnu::always_inline]] static inline void add_row(VF (*acc)[N], Row row_of, Factor factor) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
        const VF row = row_of(b);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[b][n] = vf_fma(row, vf_set1(factor(n)), acc[b][n]);
        asm("" ::: "memory");
    }
}

struct Query {
    const float* q;
    int64_t low, high;  // keys it sees: [low, high), absolute; in a Split, those of them that lie in it
};

static inline Query query_of(const AttendJob* job, const AttendTile* tile, int64_t i) {
    const int64_t row = tile->row + i / job->group, head = tile->kv_head * job->group + i % job->group;
    const int64_t position = job->positions[row];
    const int64_t low = job->window > position ? 0 : position - job->window + 1;
    return {job->q + row * job->q_stride + head * job->head_dim, low, position + 1};
}

static inline const uint8_t* block_of(const AttendJob* job, const AttendTile* tile, int64_t block) {
    return job->layer + tile->table[block] * job->block_bytes + tile->kv_head * job->head_bytes;
}

// Calls f.operator()<N>() for a run-time n in [1, kMaxQueries].
template <typename F> static inline void with_count(int64_t n, const F& f) {
    if constexpr (kMaxQueries >= 6) if (n == 6) return f.template operator()<6>();
    if constexpr (kMaxQueries >= 5) if (n == 5) return f.template operator()<5>();
    if constexpr (kMaxQueries >= 4) if (n == 4) return f.template operator()<4>();
    if constexpr (kMaxQueries >= 3) if (n == 3) return f.template operator()<3>();
    if (n == 2) return f.template operator()<2>();
    f.template operator()<1>();
}

// Calls f.operator()<N>(first) for every query, in groups of nearly equal size.
template <typename F> static inline void each_group(int64_t queries, const F& f) {
    int64_t groups = (queries + kMaxQueries - 1) / kMaxQueries;
    for (int64_t first = 0; first < queries; --groups) {
        const int64_t n = (queries - first + groups - 1) / groups;
        with_count(n, [&]<int N>() { f.template operator()<N>(first); });
        first += n;
    }
}

// Dot products of N queries with the 16 keys of each of B blocks. scores: of query n and block b at n * kScoreStride + b * 16.
template <KvType K, int N, int B>
static inline void score_blocks(const AttendJob* job, const uint8_t* const* blocks, const int64_t* ahead, const Query* queries, float* scores) {
    VF acc[B][N];
    const uint8_t* keys[B];
    int64_t next[B];
    const float* q[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) q[n] = queries[n].q;
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
        keys[b] = blocks[b];
        next[b] = ahead[b];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[b][n] = vf_set1(0.0f);
    }
    const int64_t pairs = job->head_dim / 2;
    for (int64_t i = 0; i < pairs; ++i) {
        add_row<N, B>(acc, [&](int b) { return load_row<K, false>(keys[b], i, kTokens, 0, next[b]); }, [&](int n) { return q[n][2 * i]; });
        add_row<N, B>(acc, [&](int b) { return load_row<K, true>(keys[b], i, kTokens, 0, next[b]); }, [&](int n) { return q[n][2 * i + 1]; });
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            if constexpr (K == KvType::I8) acc[b][n] = vf_mul(acc[b][n], vf_load_bf16((const uint16_t*)(keys[b] + job->scale_offset)));
            vf_store(scores + n * kScoreStride + b * kTokens, acc[b][n]);
        }
}

// Adds the values of keys [low, high) of a block at C groups of 16 columns from c on, weighted, to the sums of N queries.
template <KvType K, int N, int C>
static inline void add_columns(const AttendJob* job, const uint8_t* values, int64_t ahead, int64_t c, int64_t low, int64_t high, const float* weights,
                               float* sums) {
    const int64_t width = job->padded_dim, stride = state_size(job);
    VF acc[C][N];
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[j][n] = vf_load(sums + n * stride + c + 16 * j);
    const auto even = [&](int64_t i) __attribute__((always_inline)) {
        add_row<N, C>(acc, [&](int j) { return load_row<K, false>(values, i, width, c + 16 * j, ahead); }, [&](int n) { return weights[n * kScoreStride + 2 * i]; });
    };
    const auto odd = [&](int64_t i) __attribute__((always_inline)) {
        add_row<N, C>(acc, [&](int j) { return load_row<K, true>(values, i, width, c + 16 * j, ahead); }, [&](int n) { return weights[n * kScoreStride + 2 * i + 1]; });
    };
    if (low % 2) odd(low / 2);
    for (int64_t i = (low + 1) / 2; i < high / 2; ++i) {
        even(i);
        odd(i);
    }
    if (high % 2) even(high / 2);
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) vf_store(sums + n * stride + c + 16 * j, acc[j][n]);
}

template <KvType K, int N>
static inline void add_values(const AttendJob* job, const uint8_t* values, int64_t ahead, int64_t low, int64_t high, const float* weights, float* sums) {
    if (low >= high) return;
    constexpr int C = beside(N);
    int64_t c = 0;
    for (; c + 16 * C <= job->padded_dim; c += 16 * C) add_columns<K, N, C>(job, values, ahead, c, low, high, weights, sums);
    for (; C > 1 && c < job->padded_dim; c += 16) add_columns<K, N, 1>(job, values, ahead, c, low, high, weights, sums);
}

// The values of one block for N queries that may see different keys of it: together what all see, the rest one by one.
// base: position of the block's first key.
template <KvType K, int N>
static inline void add_block(const AttendJob* job, const uint8_t* values, int64_t ahead, int64_t base, const Query* queries, const float* weights, float* sums) {
    const int64_t stride = state_size(job);
    int64_t low[N], high[N], inner_low = 0, inner_high = kTokens;
    for (int n = 0; n < N; ++n) {
        low[n] = queries[n].low > base ? queries[n].low - base : 0;
        high[n] = queries[n].high < base + kTokens ? queries[n].high - base : kTokens;
        if (low[n] > inner_low) inner_low = low[n];
        if (high[n] < inner_high) inner_high = high[n];
    }
    if (inner_low >= inner_high) {
        for (int n = 0; n < N; ++n) add_values<K, 1>(job, values, ahead, low[n], high[n], weights + n * kScoreStride, sums + n * stride);
        return;
    }
    for (int n = 0; n < N; ++n) add_values<K, 1>(job, values, ahead, low[n], inner_low, weights + n * kScoreStride, sums + n * stride);
    add_values<K, N>(job, values, ahead, inner_low, inner_high, weights, sums);
    for (int n = 0; n < N; ++n) add_values<K, 1>(job, values, ahead, inner_high, high[n], weights + n * kScoreStride, sums + n * stride);
}

// Raw dot products -> weights exp(score - maximum), in place, for keys [low, high); keys outside, in the same blocks,
// get weight 0 whatever their slots hold. Returns the maximum, and the sum of the weights through `total`.
static inline float softmax_split(const AttendJob* job, float* scores, int64_t base, int64_t low, int64_t high, float* total) {
    static const float lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const VF lanes = vf_load(lane_numbers), hidden = vf_set1(-kInfinity), scale = vf_set1(job->scale);
    const int64_t first = (low - base) / kTokens * kTokens, last = high - base;
    VF most = hidden;
    for (int64_t i = first; i < last; i += kTokens) {
        VF s = vf_mul(vf_load(scores + i), scale);
        if (job->softcap > 0.0f) s = vf_mul(vf_tanh(vf_div(s, vf_set1(job->softcap))), vf_set1(job->softcap));
        s = vf_if_less(lanes, vf_set1((float)(last - i)), s, hidden);
        s = vf_if_less(lanes, vf_set1((float)(low - base - i)), hidden, s);
        vf_store(scores + i, s);
        most = vf_max(s, most);
    }
    const float maximum = vf_max_lane(most);
    VF sum = vf_set1(0.0f);
    for (int64_t i = first; i < last; i += kTokens) {
        const VF w = vf_exp(vf_sub(vf_load(scores + i), vf_set1(maximum)));
        vf_store(scores + i, w);
        sum = vf_add(sum, w);
    }
    *total = vf_sum(sum);
    return maximum;
}

// state <- state followed by the keys of `later`.
static inline void merge_query(const AttendJob* job, float* state, const float* later) {
    const int64_t d = job->padded_dim;
    if (later[d + 2] == 0.0f) return;
    if (state[d + 2] == 0.0f) {
        for (int64_t i = 0; i < d + 3; ++i) state[i] = later[i];
        return;
    }
    const float maximum = state[d] > later[d] ? state[d] : later[d];
    const float keep = exp1(state[d] - maximum), add = exp1(later[d] - maximum);
    for (int64_t i = 0; i < d; i += 16) vf_store(state + i, vf_fma(vf_load(later + i), vf_set1(add), vf_mul(vf_load(state + i), vf_set1(keep))));
    state[d + 1] = state[d + 1] * keep + later[d + 1] * add;
    state[d] = maximum;
}

// A tile's queries on one split: the keys each sees in it, and the blocks that any of them sees.
struct Split {
    int64_t base, first_block, last_block;
    Query queries[kTileQueries];
};

static inline Split split_of(const AttendJob* job, const AttendTile* tile, int64_t number) {
    Split split;
    split.base = number * kSplit;
    int64_t low = split.base + kSplit, high = split.base;
    for (int64_t n = 0; n < tile->last - tile->first; ++n) {
        Query& query = split.queries[n] = query_of(job, tile, tile->first + n);
        if (query.low < split.base) query.low = split.base;
        if (query.high > split.base + kSplit) query.high = split.base + kSplit;
        if (query.low >= query.high) continue;
        if (query.low < low) low = query.low;
        if (query.high > high) high = query.high;
    }
    split.first_block = low / kTokens;
    split.last_block = low < high ? (high + kTokens - 1) / kTokens : split.first_block;
    return split;
}

// Bytes from a block's keys (or values) to what will be read kAhead blocks later: the same of a later block, or this split's
// first values, or the next split's first keys; 0 at the end.
static inline int64_t bytes_ahead(const AttendJob* job, const AttendTile* tile, const Split* split, int64_t block, bool keys, int64_t end_block) {
    int64_t later = block + kAhead;
    bool to_keys = keys;
    if (later >= split->last_block) {
        if (keys) later += split->first_block - split->last_block;
        if (later >= (keys ? split->last_block : end_block)) return 0;
        to_keys = !keys;
    }
    return block_of(job, tile, later) - block_of(job, tile, block) + (to_keys ? 0 : job->value_offset) - (keys ? 0 : job->value_offset);
}

template <KvType K> static inline void score_split(const AttendJob* job, const AttendTile* tile, const Split* split, float* scores) {
    for (int64_t block = split->first_block; block < split->last_block; block += kRun) {
        const int64_t count = split->last_block - block < kRun ? split->last_block - block : kRun;
        const uint8_t* blocks[kRun];
        int64_t ahead[kRun];
        for (int64_t b = 0; b < count; ++b) {
            blocks[b] = block_of(job, tile, block + b);
            ahead[b] = bytes_ahead(job, tile, split, block + b, true, 0);
        }
        float* to = scores + block * kTokens - split->base;
        each_group(tile->last - tile->first, [&]<int N>(int64_t first) {
            constexpr int B = beside(N);
            int64_t b = 0;
            for (; b + B <= count; b += B) score_blocks<K, N, B>(job, blocks + b, ahead + b, split->queries + first, to + first * kScoreStride + b * kTokens);
            for (; B > 1 && b < count; ++b) score_blocks<K, N, 1>(job, blocks + b, ahead + b, split->queries + first, to + first * kScoreStride + b * kTokens);
        });
    }
}

template <KvType K>
static inline void mix_split(const AttendJob* job, const AttendTile* tile, const Split* split, int64_t end_block, float* weights, float* sums) {
    for (int64_t block = split->first_block; block < split->last_block; ++block) {
        const uint8_t* tiles = block_of(job, tile, block);
        const int64_t ahead = bytes_ahead(job, tile, split, block, false, end_block);
        float* w = weights + block * kTokens - split->base;
        if constexpr (K == KvType::I8) {
            const VF scale = vf_load_bf16((const uint16_t*)(tiles + job->scale_offset) + kTokens);
            for (int64_t n = 0; n < tile->last - tile->first; ++n) vf_store(w + n * kScoreStride, vf_mul(vf_load(w + n * kScoreStride), scale));
        }
        each_group(tile->last - tile->first, [&]<int N>(int64_t first) {
            add_block<K, N>(job, tiles + job->value_offset, ahead, block * kTokens, split->queries + first, w + first * kScoreStride, sums + first * state_size(job));
        });
    }
}

template <KvType K> static void tile_splits(const AttendJob* job, const AttendTile* tile, int64_t split0, int64_t split1, float* state) {
    const int64_t size = state_size(job), width = job->padded_dim, queries = tile->last - tile->first;
    const int64_t seen = query_of(job, tile, tile->last - 1).high, end = seen < split1 * kSplit ? seen : split1 * kSplit;
    alignas(64) float scores[kTileQueries * kScoreStride];
    alignas(64) float later[kTileQueries * (kMaxHeadDim + kPanel)];
    for (int64_t n = 0; n < queries; ++n) state[n * size + width + 2] = 0.0f;
    for (int64_t number = split0; number < split1; ++number) {
        const Split split = split_of(job, tile, number);
        score_split<K>(job, tile, &split, scores);
        __builtin_memset(later, 0, sizeof(float) * (size_t)(queries * size));
        for (int64_t n = 0; n < queries; ++n) {
            const Query& query = split.queries[n];
            if (query.low >= query.high) continue;
            float* facts = later + n * size + width;
            facts[0] = softmax_split(job, scores + n * kScoreStride, split.base, query.low, query.high, facts + 1);
            facts[2] = 1.0f;
        }
        mix_split<K>(job, tile, &split, (end + kTokens - 1) / kTokens, scores, later);
        for (int64_t n = 0; n < queries; ++n) merge_query(job, state + n * size, later + n * size);
    }
}

static void attend_splits(const AttendJob* job, const AttendTile* tile, int64_t split0, int64_t split1, float* state) {
    if (job->type == KvType::F32) tile_splits<KvType::F32>(job, tile, split0, split1, state);
    else if (job->type == KvType::BF16) tile_splits<KvType::BF16>(job, tile, split0, split1, state);
    else if (job->type == KvType::F16) tile_splits<KvType::F16>(job, tile, split0, split1, state);
    else tile_splits<KvType::I8>(job, tile, split0, split1, state);
}

static void attend_merge(const AttendJob* job, int64_t queries, float* state, const float* later) {
    for (int64_t n = 0; n < queries; ++n) merge_query(job, state + n * state_size(job), later + n * state_size(job));
}

static void attend_finish(const AttendJob* job, const AttendTile* tile, const float* state) {
    const int64_t d = job->padded_dim;
    for (int64_t i = tile->first; i < tile->last; ++i, state += state_size(job)) {
        const int64_t row = tile->row + i / job->group, head = tile->kv_head * job->group + i % job->group;
        float* to = job->out + row * job->out_stride + head * job->head_dim;
        const VF total = vf_set1(state[d + 1]);
        int64_t c = 0;
        for (; c + 16 <= job->head_dim; c += 16) vf_store(to + c, vf_div(vf_load(state + c), total));
        if (c < job->head_dim) vf_store_part(to + c, vf_div(vf_load(state + c), total), job->head_dim - c);
    }
}
