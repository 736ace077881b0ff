// Scalar conversions between float and the two-byte types, for code outside the kernels. Round to nearest even.
#pragma once
#include <bit>
#include <cstdint>

namespace octavo {

inline float bf16_to_float(uint16_t h) { return std::bit_cast<float>(uint32_t(h) << 16); }

inline uint16_t float_to_bf16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), rounded = u + 0x7fffu + (u >> 16 & 1);
    return uint16_t((int32_t(u & 0x7fffffffu) > 0x7f800000 ? u | 0x400000u : rounded) >> 16);  // NaN stays one, made quiet
}

inline float f16_to_float(uint16_t h) {
    // Read as a float, exponent and mantissa are off by 2^112; subnormal halves come out right as well.
    uint32_t u = std::bit_cast<uint32_t>(std::bit_cast<float>((h & 0x7fffu) << 13) * 0x1p112f);
    if ((h & 0x7c00u) == 0x7c00u) u = 0x7f800000u | (h & 0x3ffu) << 13;
    return std::bit_cast<float>(u | (h & 0x8000u) << 16);
}

inline uint16_t float_to_f16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above
    if (magnitude < 0x38800000u) {
        // Below 2^-14: adding 0.5 leaves the value in units of 2^-24 in the low mantissa bits, rounded by the addition.
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
        return uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
    }
    return uint16_t(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}

}  // namespace octavo
