// Kernels of level "portable"; compiled with that level's flags (CMakeLists.txt).
#include "types.h"

namespace octavo {
namespace {
#include "kernels/simd_portable.h"
#include "kernels/level.inl.h"
}  // namespace

extern const Kernels kPortableKernels = OCTAVO_KERNEL_TABLE("portable");
}  // namespace octavo
