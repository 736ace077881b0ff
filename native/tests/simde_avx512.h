// Test builds only (OCTAVO_SIMDE): AVX-512 by SIMDe (libsimde-dev), so that the source of the AVX-512 level can be run,
// and compared bit for bit with the AVX2 level, on a machine without AVX-512. The six intrinsics that SIMDe 0.7.4
// lacks are made of their AVX2 and F16C halves.
#pragma once
#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace octavo {
namespace {

inline simde__m512i joined(__m256i lo, __m256i hi) {
    simde__m512i r;
    __builtin_memcpy(&r, &lo, 32);
    __builtin_memcpy(reinterpret_cast<char*>(&r) + 32, &hi, 32);
    return r;
}

inline simde__m512 joined_ps(__m256 lo, __m256 hi) {
    simde__m512 r;
    __builtin_memcpy(&r, &lo, 32);
    __builtin_memcpy(reinterpret_cast<char*>(&r) + 32, &hi, 32);
    return r;
}

inline __m256i half_of(simde__m512i x, int which) {
    __m256i r;
    __builtin_memcpy(&r, reinterpret_cast<char*>(&x) + 32 * which, 32);
    return r;
}

inline simde__m512 emulated_cvtph_ps(__m256i x) {
    return joined_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}

inline simde__m512 emulated_cvtepi32_ps(simde__m512i x) {
    return joined_ps(_mm256_cvtepi32_ps(half_of(x, 0)), _mm256_cvtepi32_ps(half_of(x, 1)));
}

inline simde__m512i emulated_cvtepu16_epi32(__m256i x) {
    return joined(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
}

inline simde__m512i emulated_cvtepi8_epi32(__m128i x) {
    return joined(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}

inline __m256i emulated_cvtepi32_epi16(simde__m512i x) {
    int32_t in[16];
    int16_t out[16];
    __builtin_memcpy(in, &x, 64);
    for (int i = 0; i < 16; ++i) out[i] = (int16_t)in[i];
    __m256i r;
    __builtin_memcpy(&r, out, 32);
    return r;
}

inline simde__m512i emulated_srai_epi32(simde__m512i x, int count) {
    return joined(_mm256_srai_epi32(half_of(x, 0), count), _mm256_srai_epi32(half_of(x, 1), count));
}

}  // namespace
}  // namespace octavo

#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_srai_epi32 emulated_srai_epi32
