// Matrix products of prompt rows in AMX tiles: activations and weights rounded to bfloat16, sums in float32 (TDPBF16PS; Intel
// SDM volume 2). Panels are dequantised a chunk of inputs at a time and serve up to kPromptRows rows.
//
// An output element is one float32 accumulator that takes the blocks of 32 inputs in order, one tile instruction each, whatever
// the number of rows and columns computed beside it: a chunk's sums are stored and loaded again without loss, and a short tile
// has rows that nobody reads.

constexpr int64_t kTileItems = kTileRows * kBlock;  // bfloat16 numbers of a tile
constexpr int64_t kChunkBlocks = 16;                // blocks dequantised at a time: two panels of them are 32 KB

// Operand of LDTILECFG, palette 1. Tiles 0 and 1: sums; 2: activations; 3 and 4: weights of two panels.
struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static const TileConfig kTileConfig = {1, 0, {}, {64, 64, 64, 64, 64}, {16, 16, 16, 16, 16}};

// The thread's tiles, while it lives. A thread that keeps tiles in use slows its sibling and its own switches down.
struct Tiles {
#ifdef OCTAVO_SIMDE
    Tiles() { emulated_tile_config(&kTileConfig); }
#else
    // The compiler's own intrinsic names eight bytes of the structure as its input: the other stores may then be dropped.
    Tiles() { asm volatile("ldtilecfg %0" : : "m"(kTileConfig)); }
#endif
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// The intrinsics of tile loads do not tell the compiler which memory they read: what was stored before must have happened.
static inline void finish_stores() { asm volatile("" : : : "memory"); }

// The nearest bfloat16, ties to even, in the upper halves; the lower ones are anything. Infinities become NaN, so that one in a
// row of activations breaks all of the row's outputs. Integer operations: AVX512_BF16's flushes subnormal numbers, and may be missing.
static inline VI bf16_bits(VF x) {
    const VI u = vi_bits(x), odd = vi_and(_mm512_srli_epi32(u, 16), vi_set1(1));
    const VF rounded = vf_bits(vi_add(u, vi_add(vi_set1(0x7fff), odd))), size = vf_bits(vi_and(u, vi_set1(0x7fffffff)));
    return vi_bits(vf_if_less(size, vf_set1(__builtin_inff()), rounded, vf_set1(__builtin_nanf(""))));
}

// One tile row: pairs of neighbouring inputs, 16 columns.
static inline void store_pairs(uint16_t* out, VI even, VI odd) {
    const VI upper = vi_set1(int32_t(0xffff0000));
    _mm512_storeu_si512(out, _mm512_or_si512(_mm512_srli_epi32(even, 16), vi_and(odd, upper)));
}

static inline VF load_factors(const uint8_t* p, bool f16) { return f16 ? vf_load_f16((const uint16_t*)p) : vf_load((const float*)p); }

// scale * (q - zero) + offset, rounded after each operation, as the embedding computes it.
struct Dequantise {
    VF scale, offset;
    int32_t zero;
    bool has_offset;
    VI operator()(VI q) const {
        const VF w = vf_mul(scale, _mm512_cvtepi32_ps(_mm512_sub_epi32(q, vi_set1(zero))));
        return bf16_bits(has_offset ? vf_add(w, offset) : w);
    }
};

// Four inputs of 16 columns, one in each byte of a lane, as two tile rows.
template <bool Signed> static inline void store_fours(uint16_t* out, VI bytes, const Dequantise& values) {
    const VI low = vi_set1(0xff);
    VI q[4];
    if constexpr (Signed) {
        q[0] = _mm512_srai_epi32(vi_shl<24>(bytes), 24);
        q[1] = _mm512_srai_epi32(vi_shl<16>(bytes), 24);
        q[2] = _mm512_srai_epi32(vi_shl<8>(bytes), 24);
        q[3] = _mm512_srai_epi32(bytes, 24);
    } else {
        q[0] = vi_and(bytes, low);
        q[1] = vi_and(_mm512_srli_epi32(bytes, 8), low);
        q[2] = vi_and(_mm512_srli_epi32(bytes, 16), low);
        q[3] = _mm512_srli_epi32(bytes, 24);
    }
    store_pairs(out, values(q[0]), values(q[1]));
    store_pairs(out + 2 * kPanel, values(q[2]), values(q[3]));
}

// Block `b` of a quantised panel as a tile: [16 pairs of inputs][16 columns][2].
template <Layout L> static inline void quantised_block(const Segment* s, const uint8_t* panel, int64_t b, uint16_t* tile) {
    constexpr bool nibbles = L == Layout::Q4B32, halves = L == Layout::Q8B16;
    const uint8_t* block = panel + b * s->block_bytes;
    const uint8_t* scales = block + (nibbles ? 256 : 512);
    const int64_t factor_bytes = kPanel * (s->scale_f16 ? 2 : 4);
    const uint8_t* offsets = scales + (halves ? 2 : 1) * factor_bytes;
    for (int h = 0; h < 2; ++h) {  // 16 inputs: eight tile rows
        const int64_t at = halves ? h * factor_bytes : 0;
        const VF offset = s->has_offset ? load_factors(offsets + at, s->scale_f16) : vf_set1(0.0f);
        const Dequantise values{load_factors(scales + at, s->scale_f16), offset, s->zero, s->has_offset};
        for (int j = 0; j < 4; ++j) {
            uint16_t* out = tile + (8 * h + 2 * j) * 2 * kPanel;
            if constexpr (nibbles) {
                const VI bytes = vi_load(block + 64 * j);
                store_fours<false>(out, vi_and(h ? _mm512_srli_epi32(bytes, 4) : bytes, vi_set1(0x0f0f0f0f)), values);
            } else {
                store_fours<true>(out, vi_load(block + 64 * (4 * h + j)), values);
            }
        }
    }
}

// The same of a bfloat16 panel, whose last block may be short.
static inline void bf16_block(const Segment* s, const uint8_t* panel, int64_t b, uint16_t* tile) {
    const uint16_t* rows = (const uint16_t*)panel;
    const auto row = [&](int64_t i) {
        if (i >= s->k) return vi_set1(0);
        return vi_shl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(rows + i * kPanel))));
    };
    for (int64_t i = 0; i < kBlock; i += 2) store_pairs(tile + i * kPanel, row(b * kBlock + i), row(b * kBlock + i + 1));
}

static void dequantise_panel(const Segment* s, int64_t p, int64_t first, int64_t count, uint16_t* tiles) {
    const uint8_t* panel = s->data + p * s->panel_bytes;
    const auto block = s->layout == Layout::Q4B32   ? quantised_block<Layout::Q4B32>
                       : s->layout == Layout::Q8B32 ? quantised_block<Layout::Q8B32>
                       : s->layout == Layout::Q8B16 ? quantised_block<Layout::Q8B16>
                                                    : bf16_block;
    for (int64_t b = 0; b < count; ++b) block(s, panel, first + b, tiles + b * kTileItems);
}

// sums [16, 16] of each panel += a row tile's `count` blocks times the panels' blocks. P: one panel or two.
template <int P> static inline void multiply(const uint16_t* x, const uint16_t* weights, int64_t count, bool first, float* sums) {
    constexpr int64_t kSums = kTileRows * kPanel, kRowBytes = 64;
    if (first) {
        _tile_zero(0);
        if constexpr (P == 2) _tile_zero(1);
    } else {
        _tile_loadd(0, sums, kRowBytes);
        if constexpr (P == 2) _tile_loadd(1, sums + kSums, kRowBytes);
    }
#pragma GCC unroll 2
    for (int64_t b = 0; b < count; ++b) {
        _tile_loadd(2, x + b * kTileItems, kRowBytes);
        _tile_loadd(3, weights + b * kTileItems, kRowBytes);
        _tile_dpbf16ps(0, 2, 3);
        if constexpr (P == 2) {
            _tile_loadd(4, weights + (kChunkBlocks + b) * kTileItems, kRowBytes);
            _tile_dpbf16ps(1, 2, 4);
        }
    }
    _tile_stored(0, sums, kRowBytes);
    if constexpr (P == 2) _tile_stored(1, sums + kSums, kRowBytes);
}

static inline void write_row(float* out, const float* sums, const float* bias, int64_t columns) {
    float values[kPanel];
    const VF v = vf_load(sums);
    vf_store(values, bias ? vf_add(v, vf_load(bias)) : v);
    __builtin_memcpy(out, values, size_t(columns) * sizeof(float));
}

template <int P>
static inline void prompt_panels(const Segment* s, const uint16_t* x, int64_t rows, int64_t p, const float* bias, float* out, int64_t out_stride) {
    alignas(64) uint16_t weights[P * kChunkBlocks * kTileItems];
    alignas(64) float sums[kPromptRows / kTileRows][P][kTileRows][kPanel];
    const int64_t blocks = (s->k + kBlock - 1) / kBlock, row_tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t first = 0; first < blocks; first += kChunkBlocks) {
        const int64_t left = blocks - first, count = left < kChunkBlocks ? left : kChunkBlocks;
        for (int j = 0; j < P; ++j) dequantise_panel(s, p + j, first, count, weights + j * kChunkBlocks * kTileItems);
        finish_stores();
        for (int64_t t = 0; t < row_tiles; ++t)
            multiply<P>(x + (t * blocks + first) * kTileItems, weights, count, first == 0, &sums[t][0][0][0]);
    }
    for (int64_t t = 0; t < rows; ++t)
        for (int j = 0; j < P; ++j) {
            const int64_t at = (p + j) * kPanel, left = s->columns - at;
            write_row(out + t * out_stride + at, sums[t / kTileRows][j][t % kTileRows], bias ? bias + at : nullptr, left < kPanel ? left : kPanel);
        }
}

static void linear_prompt(const Segment* s, const uint16_t* tiles, int64_t rows, int64_t panel0, int64_t panel1, const float* bias,
                          float* out, int64_t out_stride) {
    finish_stores();
    const Tiles in_use;
    int64_t p = panel0;
    for (; p + 2 <= panel1; p += 2) prompt_panels<2>(s, tiles, rows, p, bias, out, out_stride);
    if (p < panel1) prompt_panels<1>(s, tiles, rows, p, bias, out, out_stride);
}

static void round_rows(const float* x, int64_t stride, int64_t first, int64_t rows, int64_t k, uint16_t* tiles) {
    const int64_t blocks = (k + kBlock - 1) / kBlock;
    for (int64_t t = 0; t < rows; ++t) {
        const float* row = x + t * stride;
        uint16_t* out = tiles + (first + t) / kTileRows * blocks * kTileItems + (first + t) % kTileRows * kBlock;
        for (int64_t b = 0; b < blocks; ++b, out += kTileItems)
            for (int64_t i = 0; i < kBlock; i += kPanel) {
                const int64_t at = b * kBlock + i, left = k - at;
                float part[kPanel] = {};
                if (left > 0) __builtin_memcpy(part, row + at, size_t(left < kPanel ? left : kPanel) * sizeof(float));
                const VI bits = _mm512_srli_epi32(bf16_bits(vf_load(part)), 16);
                _mm256_storeu_si256((__m256i*)(out + i), _mm512_cvtepi32_epi16(bits));
            }
    }
}

// A product of whole numbers: two row tiles, a pair of panels and a single one, two blocks, all of them short at the end. Every
// order of sums is exact, so any difference is a fault of the machine, of its system or of this build.
static bool self_test() {
    constexpr int64_t kRows = 17, kInputs = 40, kColumns = 40, kPanels = 3, kBlocks = 2;
    const auto activation = [](int64_t t, int64_t i) { return int((t * 7 + i * 5) % 17) - 8; };
    const auto weight = [](int64_t i, int64_t n) { return int((i * 3 + n * 11) % 15) - 7; };
    alignas(64) uint16_t tiles[2 * kBlocks * kTileItems] = {};
    uint16_t panels[kPanels][kInputs][kPanel] = {};
    float x[kRows][kInputs], out[kRows][kColumns];
    for (int64_t t = 0; t < kRows; ++t)
        for (int64_t i = 0; i < kInputs; ++i) x[t][i] = float(activation(t, i));
    for (int64_t i = 0; i < kInputs; ++i)
        for (int64_t n = 0; n < kColumns; ++n) {
            const float value = float(weight(i, n));  // few bits: its upper half is all of it
            uint32_t bits;
            __builtin_memcpy(&bits, &value, 4);
            panels[n / kPanel][i][n % kPanel] = uint16_t(bits >> 16);
        }
    Segment s{};
    s.layout = Layout::BF16;
    s.columns = kColumns;
    s.panels = kPanels;
    s.k = kInputs;
    s.panel_bytes = sizeof(panels[0]);
    s.data = (const uint8_t*)panels;
    round_rows(x[0], kInputs, 0, kRows, kInputs, tiles);
    linear_prompt(&s, tiles, kRows, 0, kPanels, nullptr, out[0], kColumns);
    for (int64_t t = 0; t < kRows; ++t)
        for (int64_t n = 0; n < kColumns; ++n) {
            int sum = 0;
            for (int64_t i = 0; i < kInputs; ++i) sum += activation(t, i) * weight(i, n);
            if (out[t][n] != float(sum)) return false;
        }
    return true;
}
