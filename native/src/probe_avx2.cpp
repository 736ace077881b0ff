// Probes of level "avx2".
#include "probes.h"
#include <immintrin.h>

namespace octavo {
namespace {

// A register the compiler must believe has changed: what was computed from it must be computed again.
#define OCTAVO_CHANGED(reg) asm volatile("" : "+x"(reg))
#define OCTAVO_EACH for (int i = 0; i < kChains; ++i)

inline int64_t total(__m256i v) {
    int32_t lanes[8];
    __builtin_memcpy(lanes, &v, 32);
    int64_t all = 0;
    for (int32_t lane : lanes) all += lane;
    return all;
}

int64_t read(const uint8_t* data, int64_t bytes, int64_t ahead) {
    __m256i sum[8] = {};
    for (int64_t at = 0; at < bytes; at += 256) {
        for (int line = 0; ahead && line < 4; ++line) __builtin_prefetch(data + at + ahead + 64 * line);
        for (int i = 0; i < 8; ++i) sum[i] = _mm256_add_epi32(sum[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at + 32 * i)));
    }
    int64_t all = 0;
    for (__m256i one : sum) all += total(one);
    return all;
}

int64_t f32(int64_t rounds) {
    constexpr int kChains = 12;  // two a cycle, each five cycles late at most
    __m256 sum[kChains] = {}, a = _mm256_set1_ps(1), b = a;
    for (int64_t round = 0; round < rounds; ++round) {
        OCTAVO_EACH {
            OCTAVO_CHANGED(a);
            sum[i] = _mm256_fmadd_ps(a, b, sum[i]);
        }
    }
    double all = 0;
    OCTAVO_EACH {
        float lanes[8];
        __builtin_memcpy(lanes, &sum[i], 32);
        for (float lane : lanes) all += double(lane);
    }
    return int64_t(all);
}

int64_t int16(int64_t rounds) {
    constexpr int kChains = 8;
    __m256i sum[kChains] = {}, a = _mm256_set1_epi16(1), b = a;
    for (int64_t round = 0; round < rounds; ++round) {
        OCTAVO_EACH {
            OCTAVO_CHANGED(a);
            sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(a, b));
            OCTAVO_CHANGED(sum[i]);  // else GCC adds the products of several rounds first
        }
    }
    int64_t all = 0;
    OCTAVO_EACH all += total(sum[i]);
    return all;
}

int64_t int8(int64_t rounds) {
    constexpr int kChains = 8;
    __m256i sum[kChains] = {}, a = _mm256_set1_epi8(1), b = a, ones = _mm256_set1_epi16(1);
    for (int64_t round = 0; round < rounds; ++round) {
        OCTAVO_EACH {
            OCTAVO_CHANGED(a);
            sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
            OCTAVO_CHANGED(sum[i]);
        }
    }
    int64_t all = 0;
    OCTAVO_EACH all += total(sum[i]);
    return all;
}

}  // namespace

extern const Probes kAvx2Probes = {"avx2", read, f32, int16, int8};
}  // namespace octavo
