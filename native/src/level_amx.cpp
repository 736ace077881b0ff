// What level "amx" adds to level "avx512vnni": matrix products of prompt rows in tiles. Compiled with flags of its own
// (CMakeLists.txt); machine.cpp joins the two levels.
#include "types.h"
#ifdef OCTAVO_SIMDE  // test builds emulate AVX-512 and AMX, see native/tests
#include "scalar_amx.h"
#else
#include <immintrin.h>
#endif

namespace octavo {
namespace {
#include "kernels/simd_avx512vnni.h"
#include "kernels/linear_amx.inl.h"
}  // namespace

extern const PromptKernels kAmxPromptKernels = {self_test, round_rows, linear_prompt};
}  // namespace octavo
