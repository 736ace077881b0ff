// exp, tanh, 2^n and fixed-order reductions on 16-lane vectors, written once over the level's primitives.
//
// Every lane goes through the same operations whatever its neighbours hold, and tails are copied into a padded vector
// and take the same path, so an element's bits never depend on where in a row it stands.

static constexpr float kInfinity = __builtin_inff();
static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even

// The integer in float t = kRound + n, |n| < 2^22.
static inline VI rounded_int(VF t) { return vi_sub(vi_bits(t), vi_bits(vf_set1(kRound))); }

// e^x to about 2 units in the last place; 0 below -87, infinity above 88, NaN for NaN. Range reduction by n ln 2 in two
// parts and the degree-6 polynomial of Cephes' expf (Moshier).
static inline VF vf_exp(VF x) {
    const VF low = vf_set1(-87.0f), high = vf_set1(88.0f);
    const VF c = vf_min(high, vf_max(low, x));  // the second operand is kept when it is NaN
    const VF t = vf_add(vf_mul(c, vf_set1(1.44269504088896341f)), vf_set1(kRound));
    const VF n = vf_sub(t, vf_set1(kRound));
    VF r = vf_fma(n, vf_set1(-0.693359375f), c);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    VF p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_add(vf_fma(vf_mul(r, r), p, r), vf_set1(1.0f));
    const VF power = vf_bits(vi_shl<23>(vi_add(rounded_int(t), vi_set1(127))));
    return vf_if_less(x, low, vf_set1(0.0f), vf_if_less(high, x, vf_set1(kInfinity), vf_mul(p, power)));
}

// Absolute error of about 1e-7, which is what a soft cap needs.
static inline VF vf_tanh(VF x) {
    const VF one = vf_set1(1.0f);
    return vf_sub(one, vf_div(vf_set1(2.0f), vf_add(one, vf_exp(vf_add(x, x)))));
}

static inline float exp1(float x) {
    float lanes[16];
    vf_store(lanes, vf_exp(vf_set1(x)));
    return lanes[0];
}

// Lane i with lane i + 8, then + 4, + 2, + 1: one order at every level.
static inline float vf_sum(VF x) {
    float v[16];
    vf_store(v, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) v[i] += v[i + width];
    return v[0];
}

static inline float vf_max_lane(VF x) {
    float v[16];
    vf_store(v, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
    return v[0];
}

static inline int32_t vi_sum(VI x) {
    int32_t v[16], sum = 0;
    vi_store(v, x);
    for (int i = 0; i < 16; ++i) sum += v[i];
    return sum;
}

static inline uint32_t vi_max_lane(VI x) {
    int32_t v[16], most = 0;
    vi_store(v, x);
    for (int i = 0; i < 16; ++i) most = v[i] > most ? v[i] : most;
    return (uint32_t)most;
}

// The first `count` < 16 floats, zeros after them.
static inline VF vf_load_part(const float* p, int64_t count) {
    float v[16] = {0};
    for (int64_t i = 0; i < count; ++i) v[i] = p[i];
    return vf_load(v);
}

static inline void vf_store_part(float* p, VF x, int64_t count) {
    float v[16];
    vf_store(v, x);
    for (int64_t i = 0; i < count; ++i) p[i] = v[i];
}
