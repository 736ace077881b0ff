// Row-wise kernels: quantisation of activations, RMSNorm, SiLU-gated product.

// x ~ scale * q with scale = max|x| / M, M the largest q of the rounding, and q = x * (M / max|x|) rounded to nearest even. A block that holds an
// infinity or NaN gets q = 0 and scale = NaN, so that the damage shows in its row instead of becoming a plausible
// number. Blocks below 1e-30 are zero: their reciprocal would overflow.
template <Rounding P> static inline void quantize_block(VF x0, VF x1, ActBlock* out) {
    constexpr float kMost = P == Rounding::Wide ? 127.0f * 128.0f : 127.0f;
    const VI magnitude = vi_set1(0x7fffffff);
    // As integers, magnitudes of floats order as the floats do, with infinity and then NaN on top.
    const uint32_t most = vi_max_lane(vi_max(vi_and(vi_bits(x0), magnitude), vi_and(vi_bits(x1), magnitude)));
    float amax;
    __builtin_memcpy(&amax, &most, 4);
    float scale = amax / kMost, inverse = kMost / amax;
    if (most >= 0x7f800000u || amax < 1e-30f) {
        scale = most >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
        inverse = 0.0f;
        x0 = x1 = vf_set1(0.0f);
    }
    const VI q0 = rounded_int(vf_add(vf_mul(x0, vf_set1(inverse)), vf_set1(kRound)));
    const VI q1 = rounded_int(vf_add(vf_mul(x1, vf_set1(inverse)), vf_set1(kRound)));
    store_activations<P>(q0, q1, out->q);
    out->half_sum[0] = vi_sum(q0);
    out->half_sum[1] = vi_sum(q1);
    out->sum = out->half_sum[0] + out->half_sum[1];
    out->scale = scale;
    out->offset_factor = scale * (float)out->sum;
    out->half_offset_factor[0] = scale * (float)out->half_sum[0];
    out->half_offset_factor[1] = scale * (float)out->half_sum[1];
    out->unused = 0;
}

template <Rounding P> static void quantize_rows_to(const float* x, int64_t stride, int64_t rows, int64_t k, ActBlock* out) {
    for (int64_t t = 0; t < rows; ++t) {
        const float* row = x + t * stride;
        int64_t i = 0;
        for (; i + kBlock <= k; i += kBlock) quantize_block<P>(vf_load(row + i), vf_load(row + i + 16), out++);
        if (i < k) {
            const int64_t left = k - i;
            const VF x0 = vf_load_part(row + i, left < 16 ? left : 16);
            const VF x1 = vf_load_part(row + i + (left < 16 ? left : 16), left < 16 ? 0 : left - 16);
            quantize_block<P>(x0, x1, out++);
        }
    }
}

static void quantize_rows(const float* x, int64_t stride, int64_t rows, int64_t k, Rounding rounding, ActBlock* out) {
    if (rounding == Rounding::Bytes) quantize_rows_to<Rounding::Bytes>(x, stride, rows, k, out);
    else quantize_rows_to<Rounding::Wide>(x, stride, rows, k, out);
}

// Lane i of the accumulator takes the squares of columns i, i + 16, ... in order. Where their sum leaves float32 the row
// becomes NaN: divided by infinity it would be zeros, and the model would go on as if nothing had happened.
static void rms_norm(const float* x, int64_t stride, int64_t rows, int64_t n, const float* weight, float eps, float* out,
                     int64_t out_stride) {
    for (int64_t t = 0; t < rows; ++t) {
        const float* in = x + t * stride;
        float* to = out + t * out_stride;
        VF squares = vf_set1(0.0f);
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) { const VF v = vf_load(in + i); squares = vf_fma(v, v, squares); }
        if (i < n) { const VF v = vf_load_part(in + i, n - i); squares = vf_fma(v, v, squares); }
        const float mean = vf_sum(squares) / (float)n + eps;
        const VF factor = vf_set1(mean < kInfinity ? 1.0f / __builtin_sqrtf(mean) : __builtin_nanf(""));
        for (i = 0; i + 16 <= n; i += 16) vf_store(to + i, vf_mul(vf_mul(vf_load(in + i), factor), vf_load(weight + i)));
        if (i < n)
            vf_store_part(to + i, vf_mul(vf_mul(vf_load_part(in + i, n - i), factor), vf_load_part(weight + i, n - i)), n - i);
    }
}

static inline VF silu_times(VF gate, VF up) {
    const VF one = vf_set1(1.0f);
    const VF minus = vf_sub(vf_set1(0.0f), gate);
    return vf_mul(vf_div(gate, vf_add(one, vf_exp(minus))), up);
}

static void silu_mul(const float* gate_up, int64_t stride, int64_t rows, int64_t n, float* out, int64_t out_stride) {
    for (int64_t t = 0; t < rows; ++t) {
        const float *gate = gate_up + t * stride, *up = gate + n;
        float* to = out + t * out_stride;
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) vf_store(to + i, silu_times(vf_load(gate + i), vf_load(up + i)));
        if (i < n) vf_store_part(to + i, silu_times(vf_load_part(gate + i, n - i), vf_load_part(up + i, n - i)), n - i);
    }
}
