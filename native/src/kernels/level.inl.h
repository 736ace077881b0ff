// The body of a level. A level's source file opens an anonymous namespace, includes its simd header, then this file,
// and closes the namespace: every function has internal linkage, so that the linker can never replace one level's
// code by another's. For the same reason nothing here includes a library header (see CMakeLists.txt: the build checks
// that a level's object file defines no weak symbol).
#include "math.inl.h"
#include "elementwise.inl.h"
#include "linear.inl.h"
#include "attention.inl.h"
#include "sampling.inl.h"

#define OCTAVO_KERNEL_TABLE(level_name)                                                                            \
    {                                                                                                              \
        level_name, quantize_rows, linear_quantized, linear_float, rms_norm, silu_mul, attend_splits, attend_merge, \
            attend_finish, OCTAVO_SAMPLING_TABLE, {}                                                               \
    }
