// Probes of level "portable": what plain C++ gives, vectorised by the compiler within its baseline.
#include "probes.h"

namespace octavo {
namespace {

// An array the compiler must believe has changed: nothing computed from it can be reused.
#define OCTAVO_CHANGED(array) asm volatile("" : : "r"(array) : "memory")

int64_t read(const uint8_t* data, int64_t bytes, int64_t ahead) {
    constexpr int kLanes = 64;
    int32_t sum[kLanes] = {};
    const int32_t* values = reinterpret_cast<const int32_t*>(data);
    for (int64_t i = 0; i < bytes / 4; i += kLanes) {
        for (int line = 0; ahead && line < 4; ++line) __builtin_prefetch(values + i + 16 * line + ahead / 4);
        for (int lane = 0; lane < kLanes; ++lane) sum[lane] += values[i + lane];
    }
    int64_t all = 0;
    for (int32_t one : sum) all += one;
    return all;
}

int64_t f32(int64_t rounds) {
    constexpr int kLanes = 32, kUnroll = 16;
    float sum[kLanes] = {}, factor[kLanes];
    for (float& one : factor) one = 1;
    for (int64_t round = 0; round < rounds; ++round) {
        OCTAVO_CHANGED(factor);
        for (int i = 0; i < kUnroll; ++i)
            for (int lane = 0; lane < kLanes; ++lane) sum[lane] += factor[lane] * factor[kLanes - 1 - lane];
    }
    double all = 0;
    for (float one : sum) all += double(one);
    return int64_t(all);
}

template <typename Integer> int64_t products(int64_t rounds) {
    constexpr int kItems = 512;  // stays in the first-level cache
    Integer a[kItems], b[kItems];
    for (int i = 0; i < kItems; ++i) a[i] = b[i] = 1;
    int64_t all = 0;
    for (int64_t round = 0; round < rounds; ++round) {
        OCTAVO_CHANGED(a);
        int32_t sum = 0;
        for (int i = 0; i < kItems; ++i) sum += int32_t(a[i]) * b[i];
        all += sum;
    }
    return all;
}

}  // namespace

extern const Probes kPortableProbes = {"portable", read, f32, products<int16_t>, products<int8_t>};
}  // namespace octavo
