// Test builds only (OCTAVO_SIMDE): the AMX instructions that level "amx" uses, in plain C++ on top of simde_avx512.h, so that the
// level can be run on any x86 machine. Written after the operations' pseudocode in the Intel SDM, volume 2: TDPBF16PS sums even and
// odd inputs of a tile row apart, by fused multiply-adds in order, then adds the two and adds that to the tile, rounding to nearest
// with subnormal numbers taken and made as zero. Strict where the machine would fault: tiles must be configured.
#pragma once
#include "simde_avx512.h"

#include <xmmintrin.h>

namespace octavo {
namespace {

struct EmulatedTile {
    alignas(64) uint8_t bytes[16][64];
};
// What TILERELEASE leaves: no rows, no columns.
struct EmulatedTiles {
    EmulatedTile tile[8];
    bool configured[8];
};
thread_local EmulatedTiles emulated_tiles;

inline EmulatedTile& emulated_tile(int number) {
    if (!emulated_tiles.configured[number]) __builtin_trap();
    return emulated_tiles.tile[number];
}

// config: 64 bytes, palette 1; tiles of 16 rows of 64 bytes, or unused.
inline void emulated_tile_config(const void* config) {
    uint8_t bytes[64];
    __builtin_memcpy(bytes, config, 64);
    if (bytes[0] != 1) __builtin_trap();
    for (int i = 1; i < 16; ++i)
        if (bytes[i]) __builtin_trap();
    for (int i = 0; i < 8; ++i) {
        const int columns = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8, rows = bytes[48 + i];
        if (!(columns == 64 && rows == 16) && (columns || rows)) __builtin_trap();
        emulated_tiles.configured[i] = rows != 0;
        emulated_tiles.tile[i] = {};
    }
}

inline void emulated_tile_release() { emulated_tiles = {}; }
inline void emulated_tile_zero(int number) { emulated_tile(number) = {}; }

inline void emulated_tile_loadd(int number, const void* base, long stride) {
    EmulatedTile& tile = emulated_tile(number);
    for (int row = 0; row < 16; ++row) __builtin_memcpy(tile.bytes[row], static_cast<const char*>(base) + row * stride, 64);
}

inline void emulated_tile_stored(int number, void* base, long stride) {
    const EmulatedTile& tile = emulated_tile(number);
    for (int row = 0; row < 16; ++row) __builtin_memcpy(static_cast<char*>(base) + row * stride, tile.bytes[row], 64);
}

// Bits of the two bfloat16 numbers of each lane, as floats.
inline void emulated_pairs(const uint8_t* row, float* even, float* odd) {
    uint32_t lanes[16];
    __builtin_memcpy(lanes, row, 64);
    for (int n = 0; n < 16; ++n) {
        const uint32_t first = lanes[n] << 16, second = lanes[n] & 0xffff0000u;
        __builtin_memcpy(even + n, &first, 4);
        __builtin_memcpy(odd + n, &second, 4);
    }
}

// Not inlined, so that no arithmetic leaves the two changes of MXCSR around it.
__attribute__((noinline)) void emulated_products(EmulatedTile& sums, const EmulatedTile& a, const EmulatedTile& b) {
    float even_b[16][16], odd_b[16][16];
    for (int k = 0; k < 16; ++k) emulated_pairs(b.bytes[k], even_b[k], odd_b[k]);
    for (int m = 0; m < 16; ++m) {
        float even_a[16], odd_a[16], even[16] = {}, odd[16] = {}, sum[16];
        emulated_pairs(a.bytes[m], even_a, odd_a);
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) {
                even[n] = __builtin_fmaf(even_a[k], even_b[k][n], even[n]);
                odd[n] = __builtin_fmaf(odd_a[k], odd_b[k][n], odd[n]);
            }
        __builtin_memcpy(sum, sums.bytes[m], 64);
        for (int n = 0; n < 16; ++n) sum[n] += even[n] + odd[n];
        __builtin_memcpy(sums.bytes[m], sum, 64);
    }
}

inline void emulated_tile_dpbf16ps(int sums, int a, int b) {
    constexpr unsigned kFlush = 0x1f80 | 0x8000 | 0x0040;  // no traps, round to nearest, FTZ, DAZ
    const unsigned before = _mm_getcsr();
    _mm_setcsr(kFlush);
    emulated_products(emulated_tile(sums), emulated_tile(a), emulated_tile(b));
    _mm_setcsr(before);
}

}  // namespace
}  // namespace octavo

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadd emulated_tile_loadd
#define _tile_stored emulated_tile_stored
#define _tile_zero emulated_tile_zero
#define _tile_dpbf16ps emulated_tile_dpbf16ps
#define _tile_release emulated_tile_release
