// Paged attention of one tile of query vectors over one KV head, in splits of 256 keys at fixed absolute positions.
//
// A split is two passes: all scores, their maximum, exponentials and sum; then the values. Splits are folded in order
// (online softmax, Milakov & Gimelshein 2018), by the same operations whether they were computed one after the other
// or by different threads. Tiles exist to share the reads of K and V: what one query computes never depends on its
// neighbours, since each touches exactly the keys it sees, in ascending order.
//
// State of a query, padded_dim + 16 floats: weighted sum of values [padded_dim], maximum, sum, 1 if any key was seen.

static inline int64_t state_size(const AttendJob* job) { return job->padded_dim + kPanel; }

// Rows 2i and 2i + 1 of a tile at columns [c, c + 16), row length `width`. Two-byte types interleave the two rows, so
// that a 32-bit lane holds both.
template <KvType K> static inline void load_row_pair(const uint8_t* tile, int64_t i, int64_t width, int64_t c, VF* even, VF* odd) {
    if constexpr (K == KvType::F32) {
        const float* p = (const float*)tile + 2 * i * width + c;
        *even = vf_load(p);
        *odd = vf_load(p + width);
    } else {
        const uint8_t* p = tile + (i * width + c) * 4;
        if constexpr (K == KvType::BF16) {
            const VI x = vi_load(p);
            *even = vf_bits(vi_shl<16>(x));
            *odd = vf_bits(vi_and(x, vi_set1((int32_t)0xffff0000u)));
        } else {
            vf_load_pairs_f16(p, even, odd);
        }
    }
}

struct Query {
    const float* q;
    int64_t low, high;  // keys it sees: [low, high), absolute
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

// Dot products of N queries with the 16 keys of a block. scores: of query n at n * kSplit.
template <KvType K, int N> static inline void block_scores(const uint8_t* keys, int64_t dim, const Query* queries, float* scores) {
    VF acc[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[n] = vf_set1(0.0f);
    for (int64_t i = 0; i < dim / 2; ++i) {
        VF even, odd;
        load_row_pair<K>(keys, i, kTokens, 0, &even, &odd);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            acc[n] = vf_fma(even, vf_set1(queries[n].q[2 * i]), acc[n]);
            acc[n] = vf_fma(odd, vf_set1(queries[n].q[2 * i + 1]), acc[n]);
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) vf_store(scores + n * kSplit, acc[n]);
}

// Adds the values of keys [low, high) of the split that starts at `base`, weighted, to the sums of N queries.
template <KvType K, int N>
static inline void add_values(const AttendJob* job, const AttendTile* tile, int64_t base, int64_t low, int64_t high,
                              const float* weights, float* sums) {
    if (low >= high) return;
    const int64_t width = job->padded_dim;
    for (int64_t c = 0; c < width; c += 16) {
        VF acc[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[n] = vf_load(sums + n * width + c);
        for (int64_t key = low; key < high;) {
            const uint8_t* values = block_of(job, tile, key / kTokens) + job->value_offset;
            const int64_t block_end = (key / kTokens + 1) * kTokens, end = high < block_end ? high : block_end;
            while (key < end) {
                VF even, odd;
                load_row_pair<K>(values, key % kTokens / 2, width, c, &even, &odd);
                if (key % 2 == 0) {
#pragma GCC unroll 4
                    for (int n = 0; n < N; ++n) acc[n] = vf_fma(even, vf_set1(weights[n * kSplit + key - base]), acc[n]);
                    ++key;
                }
                if (key < end) {
#pragma GCC unroll 4
                    for (int n = 0; n < N; ++n) acc[n] = vf_fma(odd, vf_set1(weights[n * kSplit + key - base]), acc[n]);
                    ++key;
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) vf_store(sums + n * width + c, acc[n]);
    }
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

// N neighbouring queries over one split; their states are folded into `state`.
template <KvType K, int N>
static inline void split_queries(const AttendJob* job, const AttendTile* tile, int64_t first, int64_t split, float* state) {
    const int64_t base = split * kSplit, width = job->padded_dim;
    Query queries[N];
    int64_t low[N], high[N], outer_low = base + kSplit, outer_high = base, inner_low = base, inner_high = base + kSplit;
    for (int n = 0; n < N; ++n) {
        queries[n] = query_of(job, tile, first + n);
        low[n] = queries[n].low > base ? queries[n].low : base;
        high[n] = queries[n].high < base + kSplit ? queries[n].high : base + kSplit;
        if (low[n] > high[n]) low[n] = high[n];
        if (low[n] < high[n]) {
            if (low[n] < outer_low) outer_low = low[n];
            if (high[n] > outer_high) outer_high = high[n];
        }
        if (low[n] > inner_low) inner_low = low[n];
        if (high[n] < inner_high) inner_high = high[n];
    }
    if (outer_low >= outer_high) return;

    alignas(64) float scores[N * kSplit];
    alignas(64) float sums[N * kMaxHeadDim];
    float maximum[N] = {}, total[N] = {};
    for (int64_t key = outer_low / kTokens * kTokens; key < outer_high; key += kTokens)
        block_scores<K, N>(block_of(job, tile, key / kTokens), job->head_dim, queries, scores + key - base);
    for (int n = 0; n < N; ++n)
        if (low[n] < high[n]) maximum[n] = softmax_split(job, scores + n * kSplit, base, low[n], high[n], &total[n]);

    __builtin_memset(sums, 0, sizeof(float) * (size_t)(N * width));
    if (inner_low >= inner_high) {  // nothing all of them see
        for (int n = 0; n < N; ++n) add_values<K, 1>(job, tile, base, low[n], high[n], scores + n * kSplit, sums + n * width);
    } else {
        for (int n = 0; n < N; ++n) add_values<K, 1>(job, tile, base, low[n], inner_low, scores + n * kSplit, sums + n * width);
        add_values<K, N>(job, tile, base, inner_low, inner_high, scores, sums);
        for (int n = 0; n < N; ++n) add_values<K, 1>(job, tile, base, inner_high, high[n], scores + n * kSplit, sums + n * width);
    }
    for (int n = 0; n < N; ++n) {
        if (low[n] >= high[n]) continue;
        alignas(64) float later[kMaxHeadDim + kPanel];
        __builtin_memcpy(later, sums + n * width, sizeof(float) * (size_t)width);
        later[width] = maximum[n];
        later[width + 1] = total[n];
        later[width + 2] = 1.0f;
        merge_query(job, state + n * state_size(job), later);
    }
}

template <KvType K> static void tile_splits(const AttendJob* job, const AttendTile* tile, int64_t split0, int64_t split1, float* state) {
    const int64_t size = state_size(job), queries = tile->last - tile->first;
    for (int64_t n = 0; n < queries; ++n) state[n * size + job->padded_dim + 2] = 0.0f;
    for (int64_t split = split0; split < split1; ++split)
        for (int64_t n = 0; n < queries;) {
            const int64_t left = queries - n;
            float* to = state + n * size;
            if (left >= 4) { split_queries<K, 4>(job, tile, tile->first + n, split, to); n += 4; }
            else if (left == 3) { split_queries<K, 3>(job, tile, tile->first + n, split, to); n += 3; }
            else if (left == 2) { split_queries<K, 2>(job, tile, tile->first + n, split, to); n += 2; }
            else { split_queries<K, 1>(job, tile, tile->first + n, split, to); n += 1; }
        }
}

static void attend_splits(const AttendJob* job, const AttendTile* tile, int64_t split0, int64_t split1, float* state) {
    if (job->type == KvType::F32) tile_splits<KvType::F32>(job, tile, split0, split1, state);
    else if (job->type == KvType::BF16) tile_splits<KvType::BF16>(job, tile, split0, split1, state);
    else tile_splits<KvType::F16>(job, tile, split0, split1, state);
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
