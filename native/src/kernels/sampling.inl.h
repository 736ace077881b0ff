// Passes over rows of logits: maxima, sums of weights, selection by a limit. Blocks of kLogitsBlock columns are summed in
// float32, in two vectors of 16 lanes, and in one order; a tail is filled with -inf, whose weight is 0, and takes the same path.

static inline VF load_logits(const float* p, int64_t left) {
    if (left >= 16) return vf_load(p);
    float v[16];
    for (int64_t i = 0; i < 16; ++i) v[i] = i < left ? p[i] : -kInfinity;
    return vf_load(v);
}

static bool max_blocks(const float* x, int64_t n, float* maxima) {
    const VI magnitude = vi_set1(0x7fffffff);
    VI most = vi_set1(0);  // as integers, NaNs are above infinity
    for (int64_t start = 0; start < n; start += kLogitsBlock) {
        const int64_t end = start + kLogitsBlock < n ? start + kLogitsBlock : n;
        VF best = vf_set1(-kInfinity);
        for (int64_t i = start; i < end; i += 16) {
            const VF v = load_logits(x + i, end - i);
            best = vf_max(v, best);  // the second operand is kept when v is NaN
            most = vi_max(most, vi_and(vi_bits(v), magnitude));
        }
        *maxima++ = vf_max_lane(best);
    }
    return vi_max_lane(most) > 0x7f800000u;
}

static inline VF scaled_logits(VF x, VF max, VF temperature, bool divide) {
    const VF z = vf_sub(x, max);
    return divide ? vf_div(z, temperature) : z;
}

static void exp_blocks(const float* x, int64_t n, float max, float temperature, float* sums) {
    const VF m = vf_set1(max), t = vf_set1(temperature);
    const bool divide = temperature != 1.0f;
    for (int64_t start = 0; start < n; start += kLogitsBlock) {
        const int64_t end = start + kLogitsBlock < n ? start + kLogitsBlock : n;
        VF even = vf_set1(0.0f), odd = even;
        int64_t i = start;
        for (; i + 16 < end; i += 32) {
            even = vf_add(even, vf_exp(scaled_logits(vf_load(x + i), m, t, divide)));
            odd = vf_add(odd, vf_exp(scaled_logits(load_logits(x + i + 16, end - i - 16), m, t, divide)));
        }
        if (i < end) even = vf_add(even, vf_exp(scaled_logits(load_logits(x + i, end - i), m, t, divide)));
        *sums++ = vf_sum(vf_add(even, odd));
    }
}

static void moment_blocks(const float* x, int64_t n, float max, float temperature, float* sums) {
    const VF m = vf_set1(max), t = vf_set1(temperature), lowest = vf_set1(-3.402823466e38f);
    for (int64_t start = 0; start < n; start += kLogitsBlock) {
        const int64_t end = start + kLogitsBlock < n ? start + kLogitsBlock : n;
        VF sum = vf_set1(0.0f);
        for (int64_t i = start; i < end; i += 16) {
            const VF z = vf_max(lowest, scaled_logits(load_logits(x + i, end - i), m, t, true));
            sum = vf_add(sum, vf_mul(vf_exp(z), z));  // weight 0 times -inf would be no number
        }
        *sums++ = vf_sum(sum);
    }
}

static void exp_list(const float* z, int64_t n, float* weights) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) vf_store(weights + i, vf_exp(vf_load(z + i)));
    if (i < n) vf_store_part(weights + i, vf_exp(vf_load_part(z + i, n - i)), n - i);
}

static int64_t collect(const float* x, int64_t n, const float* maxima, float limit, uint32_t first, uint32_t* out) {
    const VF t = vf_set1(limit);
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += kLogitsBlock) {
        if (*maxima++ < limit) continue;
        const int64_t end = start + kLogitsBlock < n ? start + kLogitsBlock : n;
        for (int64_t i = start; i < end; i += 16) {
            uint32_t mask = vf_at_least(load_logits(x + i, end - i), t);
            if (end - i < 16) mask &= (1u << (end - i)) - 1;  // a limit of -inf takes the filling too
            for (; mask; mask &= mask - 1) out[count++] = first + (uint32_t)i + (uint32_t)__builtin_ctz(mask);
        }
    }
    return count;
}

static int64_t count_at_least(const float* x, int64_t n, float limit) {
    const VF t = vf_set1(limit);
    int64_t count = 0, i = 0;
    for (; i + 16 <= n; i += 16) count += __builtin_popcount(vf_at_least(vf_load(x + i), t));
    for (; i < n; ++i) count += x[i] >= limit;
    return count;
}

#define OCTAVO_SAMPLING_TABLE { max_blocks, exp_blocks, moment_blocks, exp_list, collect, count_at_least }
