// One vector as int8 with one bfloat16 scale: x ~ scale * q, symmetric. For code outside the kernels.
//
// The scale is a bfloat16, not a longer float, so that scale * q is exact: 8 and 7 bits fit in a float's 24. What was
// read back can then be written again without a change, and every backend agrees on the numbers.
#pragma once
#include <cmath>
#include <limits>

#include "half.h"

namespace octavo {

constexpr float kMaxInt8 = 127.0f;

// The scale of `count` numbers: the largest magnitude / 127, rounded to nearest; 0 where that is below the normal numbers,
// NaN where a number is infinite or NaN, or scale * 127 would be infinite.
inline float int8_scale(const float* x, int64_t count) {
    float largest = 0.0f;
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) {
        const float size = std::fabs(x[i]);
        finite &= size <= std::numeric_limits<float>::max();
        largest = size > largest ? size : largest;
    }
    const float exact = largest / kMaxInt8;
    if (exact < std::numeric_limits<float>::min()) return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    const float scale = bf16_to_float(float_to_bf16(exact));
    return finite && scale * kMaxInt8 <= std::numeric_limits<float>::max() ? scale : std::numeric_limits<float>::quiet_NaN();
}

// x / scale to the nearest integer, ties to even, within +-127; 0 for a scale of 0 or NaN.
inline int8_t to_int8(float x, float scale) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    if (!(scale > 0.0f)) return 0;
    const float q = (x / scale + kRound) - kRound;
    return int8_t(q > kMaxInt8 ? kMaxInt8 : q < -kMaxInt8 ? -kMaxInt8 : q);
}

}  // namespace octavo
