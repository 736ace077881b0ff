// The vectors of the AVX2 level (with FMA and F16C): a VF is two 256-bit registers. Names as in simd_portable.h.
// Included inside the level's anonymous namespace, after <immintrin.h>.

struct VF { __m256 a, b; };
struct VI { __m256i a, b; };
constexpr int kLanes = 8;
constexpr int kVectors = 16 / kLanes;
constexpr int kRowTile = 4;
constexpr int kAccumulators = 6;  // VF that attention keeps in registers beside its operands

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
static inline uint32_t vf_at_least(VF x, VF limit) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_GE_OQ)) |
           (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_GE_OQ)) << 8;
}

static inline VI vi_bits(VF x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
static inline VF vf_bits(VI x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline VI vi_set1(int32_t x) { const __m256i v = _mm256_set1_epi32(x); return {v, v}; }
static inline VI vi_load(const void* p) {
    const __m256i* v = (const __m256i*)p;
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
static inline void vi_store(int32_t* p, VI x) { _mm256_storeu_si256((__m256i*)p, x.a); _mm256_storeu_si256((__m256i*)(p + 8), x.b); }
static inline VI vi_add(VI x, VI y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline VI vi_sub(VI x, VI y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
static inline VI vi_and(VI x, VI y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
static inline VI vi_max(VI x, VI y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int S> static inline VI vi_shl(VI x) { return {_mm256_slli_epi32(x.a, S), _mm256_slli_epi32(x.b, S)}; }

static inline VF vf_load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline VF vf_load_bf16(const uint16_t* p) {
    const VI wide = {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)))};
    return vf_bits(vi_shl<16>(wide));
}
static inline VF vf_load_i8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline VF halves_of(__m256i lo, __m256i hi) {
    // packus works within 128-bit halves; the permutation puts the 16 lanes back in order.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))};
}
template <bool Second> static inline VF vf_load_pairs_f16(const uint8_t* p) {
    const VI x = vi_load(p);
    const __m256i low = _mm256_set1_epi32(0xffff);
    if constexpr (Second) return halves_of(_mm256_srli_epi32(x.a, 16), _mm256_srli_epi32(x.b, 16));
    return halves_of(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
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

// The q are 16-bit integers, each four of them in the order 0 2 1 3: what a 32-bit lane of weights, bytes of inputs 0 to
// 3, comes apart into by shifts is the pair 0 2 and the pair 1 3.
static inline __m256i in_pairs(VI q) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(q.a, q.b), 0xd8);
    return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(packed, 0xd8), 0xd8);
}
static inline __m128i in_bytes(VI q) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(q.a, q.b), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
// Wide: 32 integers of 16 bits in the order of in_pairs. Bytes: 32 bytes in order.
template <Rounding P> static inline void store_activations(VI q0, VI q1, int16_t* q) {
    if constexpr (P == Rounding::Bytes) {
        _mm256_store_si256((__m256i*)q, _mm256_set_m128i(in_bytes(q1), in_bytes(q0)));
    } else {
        _mm256_store_si256((__m256i*)q, in_pairs(q0));
        _mm256_store_si256((__m256i*)(q + 16), in_pairs(q1));
    }
}

template <int R> static inline void clear_dots(CI (*d)[kVectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) d[r][v] = _mm256_setzero_si256();
}

// Adds to the dots of R rows their pair number `pair` times the two weights of each column that `unpack` takes out of
// the column's four bytes. Rows share the unpacked weights, columns the broadcast pair; every sum fits in 32 bits.
template <int R, typename Unpack>
[[gnu::always_inline]] static inline void add_pair(const uint8_t* w, const ActBlock* const* x, int pair, CI (*d)[kVectors], Unpack unpack) {
    __m256i weights[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) weights[v] = unpack(_mm256_loadu_si256((const __m256i*)(w + 32 * v)));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        int32_t two;
        __builtin_memcpy(&two, x[r]->q + 2 * pair, 4);
        const __m256i both = _mm256_set1_epi32(two);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            d[r][v] = _mm256_add_epi32(d[r][v], _mm256_madd_epi16(weights[v], both));
            // Does nothing, but the sum must exist here: free to regroup the sums of a whole block, GCC computes all
            // products first and moves most of them to the stack and back.
            asm("" : "+x"(d[r][v]));
        }
    }
}

// Adds to the sums of R rows group number `group` of their bytes, four inputs, times the four weights of each column.
// A product of the instruction is at most 2 * 15 * 127, and eight of them, a block's, still fit in its 16 bits.
template <int R>
[[gnu::always_inline]] static inline void add_bytes(const __m256i* weights, const ActBlock* const* x, int group, __m256i (*sums)[kVectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        int32_t four;
        __builtin_memcpy(&four, (const int8_t*)x[r]->q + 4 * group, 4);
        const __m256i all = _mm256_set1_epi32(four);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = _mm256_add_epi16(sums[r][v], _mm256_maddubs_epi16(weights[v], all));
            asm("" : "+x"(sums[r][v]));  // as in add_pair
        }
    }
}

template <int R> static inline void dots_u4_bytes(const uint8_t* w, const ActBlock* const* x, CI (*d)[kVectors]) {
    const __m256i nibble = _mm256_set1_epi8(15);
    clear_dots<R>(d);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, w += 64) {
        __m256i bytes[kVectors], weights[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            bytes[v] = _mm256_loadu_si256((const __m256i*)(w + 32 * v));
            weights[v] = _mm256_and_si256(bytes[v], nibble);
        }
        add_bytes<R>(weights, x, j, d);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) weights[v] = _mm256_and_si256(_mm256_srli_epi16(bytes[v], 4), nibble);
        add_bytes<R>(weights, x, j + 4, d);
    }
    const __m256i one = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) d[r][v] = _mm256_madd_epi16(d[r][v], one);
}

template <int R> static inline void dots_u4_wide(const uint8_t* w, const ActBlock* const* x, CI (*d)[kVectors]) {
    const __m256i nibble = _mm256_set1_epi16(15);
    clear_dots<R>(d);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, w += 64) {
        add_pair<R>(w, x, 2 * j, d, [&](__m256i bytes) { return _mm256_and_si256(bytes, nibble); });
        add_pair<R>(w, x, 2 * j + 1, d, [&](__m256i bytes) { return _mm256_and_si256(_mm256_srli_epi16(bytes, 8), nibble); });
        add_pair<R>(w, x, 2 * j + 8, d, [&](__m256i bytes) { return _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble); });
        add_pair<R>(w, x, 2 * j + 9, d, [](__m256i bytes) { return _mm256_srli_epi16(bytes, 12); });
    }
}

template <Rounding P, int R> static inline void dots_u4(const uint8_t* w, const ActBlock* const* x, CI (*d)[kVectors]) {
    if constexpr (P == Rounding::Bytes) dots_u4_bytes<R>(w, x, d);
    else dots_u4_wide<R>(w, x, d);
}

constexpr int32_t kByteBias = 0;
template <int R, int G0, int G1> static inline void dots_s8(const uint8_t* w, const ActBlock* const* x, CI (*d)[kVectors]) {
    clear_dots<R>(d);
#pragma GCC unroll 8
    for (int j = G0; j < G1; ++j) {
        add_pair<R>(w + j * 64, x, 2 * j, d, [](__m256i bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); });
        add_pair<R>(w + j * 64, x, 2 * j + 1, d, [](__m256i bytes) { return _mm256_srai_epi16(bytes, 8); });
    }
}
