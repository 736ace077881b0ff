// Kernels of level "avx2"; compiled with that level's flags (CMakeLists.txt).
#include "types.h"
#include <immintrin.h>

namespace octavo {
namespace {
#include "kernels/simd_avx2.h"
#include "kernels/level.inl.h"
}  // namespace

extern const Kernels kAvx2Kernels = OCTAVO_KERNEL_TABLE("avx2");
}  // namespace octavo
