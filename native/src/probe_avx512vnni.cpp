// Probes of level "avx512vnni". A test build that emulates the level has none: its speed says nothing.
#include "probes.h"
#ifndef OCTAVO_SIMDE
#include <immintrin.h>

namespace octavo {
namespace {

#define OCTAVO_CHANGED(reg) asm volatile("" : "+v"(reg))
#define OCTAVO_EACH for (int i = 0; i < kChains; ++i)

inline int64_t total(__m512i v) {
    int32_t lanes[16];
    __builtin_memcpy(lanes, &v, 64);
    int64_t all = 0;
    for (int32_t lane : lanes) all += lane;
    return all;
}

int64_t read(const uint8_t* data, int64_t bytes, int64_t ahead) {
    __m512i sum[8] = {};
    for (int64_t at = 0; at < bytes; at += 512) {
        for (int line = 0; ahead && line < 8; ++line) __builtin_prefetch(data + at + ahead + 64 * line);
        for (int i = 0; i < 8; ++i) sum[i] = _mm512_add_epi32(sum[i], _mm512_loadu_si512(data + at + 64 * i));
    }
    int64_t all = 0;
    for (__m512i one : sum) all += total(one);
    return all;
}

int64_t f32(int64_t rounds) {
    constexpr int kChains = 12;
    __m512 sum[kChains] = {}, a = _mm512_set1_ps(1), b = a;
    for (int64_t round = 0; round < rounds; ++round) {
        OCTAVO_EACH {
            OCTAVO_CHANGED(a);
            sum[i] = _mm512_fmadd_ps(a, b, sum[i]);
        }
    }
    double all = 0;
    OCTAVO_EACH {
        float lanes[16];
        __builtin_memcpy(lanes, &sum[i], 64);
        for (float lane : lanes) all += double(lane);
    }
    return int64_t(all);
}

int64_t int16(int64_t rounds) {
    constexpr int kChains = 12;
    __m512i sum[kChains] = {}, a = _mm512_set1_epi16(1), b = a;
    for (int64_t round = 0; round < rounds; ++round) {
        OCTAVO_EACH {
            OCTAVO_CHANGED(a);
            sum[i] = _mm512_dpwssd_epi32(sum[i], a, b);
        }
    }
    int64_t all = 0;
    OCTAVO_EACH all += total(sum[i]);
    return all;
}

int64_t int8(int64_t rounds) {
    constexpr int kChains = 12;
    __m512i sum[kChains] = {}, a = _mm512_set1_epi8(1), b = a;
    for (int64_t round = 0; round < rounds; ++round) {
        OCTAVO_EACH {
            OCTAVO_CHANGED(a);
            sum[i] = _mm512_dpbusd_epi32(sum[i], a, b);
        }
    }
    int64_t all = 0;
    OCTAVO_EACH all += total(sum[i]);
    return all;
}

}  // namespace

extern const Probes kAvx512VnniProbes = {"avx512vnni", read, f32, int16, int8};
}  // namespace octavo
#endif
