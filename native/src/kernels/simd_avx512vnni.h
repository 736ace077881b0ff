// The vectors of the AVX-512 level (F, BW, VL, DQ, VNNI): a VF is one 512-bit register. Names as in simd_portable.h.
// Included inside the level's anonymous namespace, after <immintrin.h>.

using VF = __m512;
using VI = __m512i;
constexpr int kLanes = 16;
constexpr int kVectors = 16 / kLanes;
constexpr int kRowTile = 8;
constexpr int kAccumulators = 12;  // VF that attention keeps in registers beside its operands

static inline VF vf_set1(float x) { return _mm512_set1_ps(x); }
static inline VF vf_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float* p, VF x) { _mm512_storeu_ps(p, x); }
static inline VF vf_add(VF x, VF y) { return _mm512_add_ps(x, y); }
static inline VF vf_sub(VF x, VF y) { return _mm512_sub_ps(x, y); }
static inline VF vf_mul(VF x, VF y) { return _mm512_mul_ps(x, y); }
static inline VF vf_div(VF x, VF y) { return _mm512_div_ps(x, y); }
static inline VF vf_fma(VF x, VF y, VF z) { return _mm512_fmadd_ps(x, y, z); }
static inline VF vf_if_less(VF x, VF limit, VF yes, VF no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), no, yes);
}
static inline uint32_t vf_at_least(VF x, VF limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ); }
static inline VF vf_max(VF x, VF y) { return _mm512_max_ps(x, y); }
static inline VF vf_min(VF x, VF y) { return _mm512_min_ps(x, y); }

static inline VI vi_bits(VF x) { return _mm512_castps_si512(x); }
static inline VF vf_bits(VI x) { return _mm512_castsi512_ps(x); }
static inline VI vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline VI vi_load(const void* p) { return _mm512_loadu_si512(p); }
static inline void vi_store(int32_t* p, VI x) { _mm512_storeu_si512(p, x); }
static inline VI vi_add(VI x, VI y) { return _mm512_add_epi32(x, y); }
static inline VI vi_sub(VI x, VI y) { return _mm512_sub_epi32(x, y); }
static inline VI vi_and(VI x, VI y) { return _mm512_and_si512(x, y); }
static inline VI vi_max(VI x, VI y) { return _mm512_max_epi32(x, y); }
template <int S> static inline VI vi_shl(VI x) { return _mm512_slli_epi32(x, S); }

static inline VF vf_load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline VF vf_load_bf16(const uint16_t* p) {
    return vf_bits(vi_shl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))));
}
static inline VF vf_load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
template <bool Second> static inline VF vf_load_pairs_f16(const uint8_t* p) {
    const VI x = vi_load(p);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(Second ? _mm512_srli_epi32(x, 16) : x));  // truncates: the low halves
}

using CF = VF;
using CI = VI;
static inline CF cf_zero() { return _mm512_setzero_ps(); }
static inline CF cf_set1(float x) { return vf_set1(x); }
static inline CF cf_load(const float* p) { return vf_load(p); }
static inline CF cf_load_f16(const uint16_t* p) { return vf_load_f16(p); }
static inline void cf_store(float* p, CF x) { vf_store(p, x); }
static inline CF cf_mul(CF x, CF y) { return vf_mul(x, y); }
static inline CF cf_fma(CF x, CF y, CF z) { return vf_fma(x, y, z); }
static inline CF cf_from_int(CI x) { return _mm512_cvtepi32_ps(x); }
static inline CI ci_sub_set1(CI x, int32_t y) { return _mm512_sub_epi32(x, _mm512_set1_epi32(y)); }

// The products are of bytes, so wide q are two planes of 32 bytes, first all high, then all low: q = 128 * high + low with
// |high| <= 127 and low in [-64, 63]. Two integer dot products, exact both, give what one on 16-bit integers would.
constexpr int kPlaneBits = 7;
static inline void store_planes(VI q, int8_t* high) {
    const __m512i h = _mm512_srai_epi32(vi_add(q, vi_set1(1 << (kPlaneBits - 1))), kPlaneBits);
    _mm_storeu_si128((__m128i*)high, _mm512_cvtsepi32_epi8(h));
    _mm_storeu_si128((__m128i*)(high + 32), _mm512_cvtsepi32_epi8(vi_sub(q, vi_shl<kPlaneBits>(h))));
}
template <Rounding P> static inline void store_activations(VI q0, VI q1, int16_t* q) {
    int8_t* bytes = (int8_t*)q;
    if constexpr (P == Rounding::Bytes) {
        _mm_storeu_si128((__m128i*)bytes, _mm512_cvtsepi32_epi8(q0));
        _mm_storeu_si128((__m128i*)(bytes + 16), _mm512_cvtsepi32_epi8(q1));
    } else {
        store_planes(q0, bytes);
        store_planes(q1, bytes + 16);
    }
}

// Four consecutive bytes of a plane in every 32-bit lane.
static inline __m512i four_of(const ActBlock* x, int plane, int group) {
    int32_t four;
    __builtin_memcpy(&four, (const int8_t*)x->q + 32 * plane + 4 * group, 4);
    return _mm512_set1_epi32(four);
}

static inline CI join_planes(CI high, CI low) { return _mm512_add_epi32(_mm512_slli_epi32(high, kPlaneBits), low); }

template <Rounding P, int R> static inline void dots_u4(const uint8_t* w, const ActBlock* const* x, CI (*d)[kVectors]) {
    constexpr bool planes = P == Rounding::Wide;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i high[R], low[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) high[r] = low[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i bytes = _mm512_loadu_si512(w + j * 64);
        const __m512i first = _mm512_and_si512(bytes, nibble);
        const __m512i second = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            high[r] = _mm512_dpbusd_epi32(high[r], first, four_of(x[r], 0, j));
            high[r] = _mm512_dpbusd_epi32(high[r], second, four_of(x[r], 0, j + 4));
            if constexpr (planes) {
                low[r] = _mm512_dpbusd_epi32(low[r], first, four_of(x[r], 1, j));
                low[r] = _mm512_dpbusd_epi32(low[r], second, four_of(x[r], 1, j + 4));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) d[r][0] = planes ? join_planes(high[r], low[r]) : high[r];
}

// VNNI multiplies unsigned by signed bytes: the weight's sign bit is flipped, w + 128, and the caller takes 128 times
// the sum of the activations off again. All exact in 32 bits.
constexpr int32_t kByteBias = 128;
template <int R, int G0, int G1> static inline void dots_s8(const uint8_t* w, const ActBlock* const* x, CI (*d)[kVectors]) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    __m512i high[R], low[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) high[r] = low[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = G0; j < G1; ++j) {
        const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(w + j * 64), flip);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            high[r] = _mm512_dpbusd_epi32(high[r], bytes, four_of(x[r], 0, j));
            low[r] = _mm512_dpbusd_epi32(low[r], bytes, four_of(x[r], 1, j));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) d[r][0] = join_planes(high[r], low[r]);
}
