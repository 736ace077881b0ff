// Kernels of level "avx512vnni"; compiled with that level's flags (CMakeLists.txt).
#include "types.h"
#ifdef OCTAVO_SIMDE  // test builds emulate AVX-512, see native/tests
#include "simde_avx512.h"
#else
#include <immintrin.h>
#endif

namespace octavo {
namespace {
#include "kernels/simd_avx512vnni.h"
#include "kernels/level.inl.h"
}  // namespace

extern const Kernels kAvx512VnniKernels = OCTAVO_KERNEL_TABLE("avx512vnni");
}  // namespace octavo
