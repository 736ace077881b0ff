// The 16-lane vectors of the portable level: plain arrays, which the compiler vectorises as far as its baseline allows.
// Every level's header defines the same names with the same meaning, lane for lane:
//   VF, VI  16 floats, 16 int32.            CF, CI  as many of them as one register of the level holds (kLanes).
// Here kLanes is 16, so CF is VF. Included inside the level's anonymous namespace.

struct VF { float v[16]; };
struct VI { int32_t v[16]; };
constexpr int kLanes = 16;
constexpr int kVectors = 16 / kLanes;  // registers of columns in a panel
constexpr int kRowTile = 4;
constexpr int kAccumulators = 2;  // VF that attention keeps in registers beside its operands

#define OCTAVO_EACH for (int i = 0; i < 16; ++i)

static inline float bits_to_float(uint32_t u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; __builtin_memcpy(&u, &f, 4); return u; }

static inline float half_to_float(uint32_t h) {
    // The half's exponent and mantissa, read as a float, are off by 2^112; subnormal halves come out right as well.
    float magnitude = bits_to_float((h & 0x7fffu) << 13) * bits_to_float(0x77800000u);
    if ((h & 0x7c00u) == 0x7c00u) magnitude = bits_to_float(0x7f800000u | (h & 0x3ffu) << 13);
    return bits_to_float(float_to_bits(magnitude) | (h & 0x8000u) << 16);
}

// One rounding where the hardware has it. Software fma would be a call per lane; this level accepts two roundings.
static inline float fma1(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline VF vf_set1(float x) { VF r; OCTAVO_EACH r.v[i] = x; return r; }
static inline VF vf_load(const float* p) { VF r; __builtin_memcpy(r.v, p, 64); return r; }
static inline void vf_store(float* p, VF a) { __builtin_memcpy(p, a.v, 64); }
static inline VF vf_add(VF a, VF b) { OCTAVO_EACH a.v[i] += b.v[i]; return a; }
static inline VF vf_sub(VF a, VF b) { OCTAVO_EACH a.v[i] -= b.v[i]; return a; }
static inline VF vf_mul(VF a, VF b) { OCTAVO_EACH a.v[i] *= b.v[i]; return a; }
static inline VF vf_div(VF a, VF b) { OCTAVO_EACH a.v[i] /= b.v[i]; return a; }
static inline VF vf_fma(VF a, VF b, VF c) { OCTAVO_EACH c.v[i] = fma1(a.v[i], b.v[i], c.v[i]); return c; }
// As MAXPS and MINPS: the second operand when either is NaN.
static inline VF vf_max(VF a, VF b) { OCTAVO_EACH b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return b; }
static inline VF vf_min(VF a, VF b) { OCTAVO_EACH b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return b; }
static inline VF vf_if_less(VF x, VF limit, VF yes, VF no) { OCTAVO_EACH no.v[i] = x.v[i] < limit.v[i] ? yes.v[i] : no.v[i]; return no; }
// Bit i: lane i of x is at least limit's (false for NaN).
static inline uint32_t vf_at_least(VF x, VF limit) { uint32_t m = 0; OCTAVO_EACH m |= (uint32_t)(x.v[i] >= limit.v[i]) << i; return m; }

static inline VI vi_bits(VF a) { VI r; __builtin_memcpy(r.v, a.v, 64); return r; }
static inline VF vf_bits(VI a) { VF r; __builtin_memcpy(r.v, a.v, 64); return r; }
static inline VI vi_set1(int32_t x) { VI r; OCTAVO_EACH r.v[i] = x; return r; }
static inline VI vi_load(const void* p) { VI r; __builtin_memcpy(r.v, p, 64); return r; }
static inline void vi_store(int32_t* p, VI a) { __builtin_memcpy(p, a.v, 64); }
static inline VI vi_add(VI a, VI b) { OCTAVO_EACH a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return a; }
static inline VI vi_sub(VI a, VI b) { OCTAVO_EACH a.v[i] = (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]); return a; }
static inline VI vi_and(VI a, VI b) { OCTAVO_EACH a.v[i] &= b.v[i]; return a; }
static inline VI vi_max(VI a, VI b) { OCTAVO_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
template <int S> static inline VI vi_shl(VI a) { OCTAVO_EACH a.v[i] = (int32_t)((uint32_t)a.v[i] << S); return a; }

static inline VF vf_load_f16(const uint16_t* p) { VF r; OCTAVO_EACH r.v[i] = half_to_float(p[i]); return r; }
static inline VF vf_load_bf16(const uint16_t* p) { VF r; OCTAVO_EACH r.v[i] = bits_to_float((uint32_t)p[i] << 16); return r; }
static inline VF vf_load_i8(const int8_t* p) { VF r; OCTAVO_EACH r.v[i] = (float)p[i]; return r; }
// 16 pairs of halves -> their first or their second members.
template <bool Second> static inline VF vf_load_pairs_f16(const uint8_t* p) {
    VF r;
    const VI x = vi_load(p);
    OCTAVO_EACH r.v[i] = half_to_float(Second ? (uint32_t)x.v[i] >> 16 : (uint32_t)x.v[i] & 0xffffu);
    return r;
}

using CF = VF;
using CI = VI;
static inline CF cf_zero() { return vf_set1(0.0f); }
static inline CF cf_set1(float x) { return vf_set1(x); }
static inline CF cf_load(const float* p) { return vf_load(p); }
static inline CF cf_load_f16(const uint16_t* p) { return vf_load_f16(p); }
static inline void cf_store(float* p, CF a) { vf_store(p, a); }
static inline CF cf_mul(CF a, CF b) { return vf_mul(a, b); }
static inline CF cf_fma(CF a, CF b, CF c) { return vf_fma(a, b, c); }
static inline CF cf_from_int(CI a) { CF r; OCTAVO_EACH r.v[i] = (float)a.v[i]; return r; }
static inline CI ci_sub_set1(CI a, int32_t x) { OCTAVO_EACH a.v[i] -= x; return a; }

// What ActBlock::q holds is the level's own choice. Here: the 32 q in order.
template <Rounding P> static inline void store_activations(VI q0, VI q1, int16_t* q) {
    OCTAVO_EACH { q[i] = (int16_t)q0.v[i]; q[16 + i] = (int16_t)q1.v[i]; }
}

// Integer dot products of a panel's columns with R rows over a block of 4-bit weights. w: the block's bytes,
// [4][16 columns][4]; low nibbles are inputs 4j.., high nibbles inputs 16 + 4j...
template <Rounding P, int R> static inline void dots_u4(const uint8_t* w, const ActBlock* const* x, CI (*d)[kVectors]) {
    for (int r = 0; r < R; ++r) {
        d[r][0] = vi_set1(0);
        for (int j = 0; j < 4; ++j)
            for (int c = 0; c < 16; ++c)
                for (int t = 0; t < 4; ++t) {
                    const int byte = w[j * 64 + c * 4 + t];
                    d[r][0].v[c] += (byte & 15) * x[r]->q[4 * j + t] + (byte >> 4) * x[r]->q[16 + 4 * j + t];
                }
    }
}

// The same over the input groups [G0, G1) of 8-bit weights, [8][16 columns][4]. What the result is too large by, per
// unit of the sum of the row's q, is kByteBias.
constexpr int32_t kByteBias = 0;
template <int R, int G0, int G1> static inline void dots_s8(const uint8_t* w, const ActBlock* const* x, CI (*d)[kVectors]) {
    for (int r = 0; r < R; ++r) {
        d[r][0] = vi_set1(0);
        for (int j = G0; j < G1; ++j)
            for (int c = 0; c < 16; ++c)
                for (int t = 0; t < 4; ++t) d[r][0].v[c] += (int8_t)w[j * 64 + c * 4 + t] * x[r]->q[4 * j + t];
    }
}

#undef OCTAVO_EACH
