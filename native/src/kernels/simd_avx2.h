// The vectors of the AVX2 level (with FMA and F16C): a VF is two 256-bit registers. Names as in simd_portable.h.
// Included inside the level's anonymous namespace, after <immintrin.h>.

struct VF { __m256 a, b; };
struct VI { __m256i a, b; };
constexpr int kLanes = 8;
constexpr int kRowTile = 4;

static inline VF vf_set1(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
static inline VF vf_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void vf_store(float* p, VF x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline VF vf_add(VF x, VF y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline VF vf_sub(VF x, VF y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline VF vf_mul(VF x, VF y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline VF vf_div(VF x, VF y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline VF vf_fma(VF x, VF y, VF z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline VF vf_max(VF x, VF y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline VF vf_min(VF x, VF y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline VF vf_if_less(VF x, VF limit, VF yes, VF no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ))};
}

static inline VI vi_bits(VF x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
static inline VF vf_bits(VI x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline VI vi_set1(int32_t x) { const __m256i v = _mm256_set1_epi32(x); return {v, v}; }
static inline VI vi_load(const void* p) {
    const __m256i* v = (const __m256i*)p;
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
static inline void vi_store(int32_t* p, VI x) { _mm256_storeu_si256((__m256i*)p, x.a); _mm256_storeu_si256((__m256i*)(p + 8), x.b); }
static inline void vi_store_i8(int8_t* p, VI x) {
    const __m128i lo = _mm_packs_epi32(_mm256_castsi256_si128(x.a), _mm256_extracti128_si256(x.a, 1));
    const __m128i hi = _mm_packs_epi32(_mm256_castsi256_si128(x.b), _mm256_extracti128_si256(x.b, 1));
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(lo, hi));
}
static inline VI vi_add(VI x, VI y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline VI vi_sub(VI x, VI y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
static inline VI vi_and(VI x, VI y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
static inline VI vi_max(VI x, VI y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int S> static inline VI vi_sra(VI x) { return {_mm256_srai_epi32(x.a, S), _mm256_srai_epi32(x.b, S)}; }
template <int S> static inline VI vi_shl(VI x) { return {_mm256_slli_epi32(x.a, S), _mm256_slli_epi32(x.b, S)}; }

static inline VF vf_load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline VF vf_load_bf16(const uint16_t* p) {
    const VI wide = {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)))};
    return vf_bits(vi_shl<16>(wide));
}
static inline VF halves_of(__m256i lo, __m256i hi) {
    // packus works within 128-bit halves; the permutation puts the 16 lanes back in order.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))};
}
static inline void vf_load_pairs_f16(const uint8_t* p, VF* even, VF* odd) {
    const VI x = vi_load(p);
    const __m256i low = _mm256_set1_epi32(0xffff);
    *even = halves_of(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    *odd = halves_of(_mm256_srli_epi32(x.a, 16), _mm256_srli_epi32(x.b, 16));
}

using CF = __m256;
using CI = __m256i;
static inline CF cf_zero() { return _mm256_setzero_ps(); }
static inline CF cf_set1(float x) { return _mm256_set1_ps(x); }
static inline CF cf_load(const float* p) { return _mm256_loadu_ps(p); }
static inline CF cf_load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void cf_store(float* p, CF x) { _mm256_storeu_ps(p, x); }
static inline CF cf_mul(CF x, CF y) { return _mm256_mul_ps(x, y); }
static inline CF cf_fma(CF x, CF y, CF z) { return _mm256_fmadd_ps(x, y, z); }
static inline CF cf_from_int(CI x) { return _mm256_cvtepi32_ps(x); }
static inline CI ci_sub_set1(CI x, int32_t y) { return _mm256_sub_epi32(x, _mm256_set1_epi32(y)); }

// Four consecutive bytes of a plane in every 32-bit lane.
static inline __m256i four_of(const int8_t* plane, int group) {
    int32_t four;
    __builtin_memcpy(&four, plane + 4 * group, 4);
    return _mm256_set1_epi32(four);
}

// kPlane * sum(high) + sum(low) over neighbouring 16-bit sums.
static inline __m256i join_planes(__m256i high, __m256i low) {
    return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(kPlane)), _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
}

// Unsigned nibble times signed byte; eight pairs of products add up to at most 8 * 2 * 15 * 127 = 30480, so 16-bit
// sums of a whole block cannot overflow.
template <int R> static inline void dots_u4(const uint8_t* w, const ActBlock* const* x, CI* d) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i high[R], low[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) high[r] = low[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)(w + j * 64));
        const __m256i first = _mm256_and_si256(bytes, nibble);
        const __m256i second = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(first, four_of(x[r]->high, j)));
            high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(second, four_of(x[r]->high, j + 4)));
            low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(first, four_of(x[r]->low, j)));
            low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(second, four_of(x[r]->low, j + 4)));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) d[r] = join_planes(high[r], low[r]);
}

// |w| as an unsigned byte times the activation with w's sign: 2 * 128 * 127 = 32512 fits in 16 bits, two such sums do
// not, so each goes to 32 bits at once. w = -128 is right (|w| = 128 unsigned); neither plane ever holds -128.
constexpr int32_t kByteBias = 0;
template <int R, int G0, int G1> static inline void dots_s8(const uint8_t* w, const ActBlock* const* x, CI* d) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) d[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = G0; j < G1; ++j) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)(w + j * 64));
        const __m256i magnitude = _mm256_abs_epi8(bytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256i high = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(four_of(x[r]->high, j), bytes));
            const __m256i low = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(four_of(x[r]->low, j), bytes));
            d[r] = _mm256_add_epi32(d[r], join_planes(high, low));
        }
    }
}
