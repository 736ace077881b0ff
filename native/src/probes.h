// Loops that find out what this machine can do at most: the figures that kernels are compared with. One table per
// instruction-set level, compiled with that level's flags (probe_*.cpp); the rules of types.h hold here too.
//
// A probe's result follows from the work: all factors are 1, so a sum is the number of products that were added, and of
// a buffer of ones it is the number of integers that were read. A loop the compiler shortened gives itself away.
#pragma once
#include <cstdint>

namespace octavo {

struct Probes {
    const char* name;
    // Sum of the int32 in `bytes` (a multiple of 1024) from `data`; prefetches `ahead` bytes ahead, 0: not at all.
    int64_t (*read)(const uint8_t* data, int64_t bytes, int64_t ahead);
    // `rounds` (at most 2^20) of independent multiply-adds; the number of products.
    int64_t (*f32)(int64_t rounds);
    int64_t (*int16)(int64_t rounds);
    int64_t (*int8)(int64_t rounds);
};

extern const Probes kPortableProbes;
extern const Probes kAvx2Probes;
extern const Probes kAvx512VnniProbes;

}  // namespace octavo
