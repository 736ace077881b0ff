// Matrix products over panels of 16 output columns.
//
// An output element is one accumulator that takes the blocks (or, for float layouts, the inputs) in order, with the
// same fused operations whatever the number of rows or columns computed beside it. Rows are tiled only so that they
// share the loads of the weights; nothing is ever summed across a tile.

static inline CF load_scales(const uint8_t* p, int64_t first, bool f16) {
    return f16 ? cf_load_f16((const uint16_t*)p + first) : cf_load((const float*)p + first);
}

// acc += (dot - zero * sum) * (weight scale * activation scale), and the weight's offset times scale * sum.
static inline CF fold(CF acc, CI dot, int32_t zero, int32_t sum, CF scales, float x_scale) {
    if (zero != 0) dot = ci_sub_set1(dot, zero * sum);
    return cf_fma(cf_from_int(dot), cf_mul(scales, cf_set1(x_scale)), acc);
}

// R rows times a panel: kVectors registers of columns.
template <Layout L, Rounding P, int R>
static inline void quantized_tile(const Segment* s, const uint8_t* panel, const ActBlock* x, int64_t blocks_per_row, CF (*acc)[kVectors]) {
    constexpr bool nibbles = L == Layout::Q4B32, halves = L == Layout::Q8B16;
    const int32_t zero = s->zero + (nibbles ? 0 : kByteBias);
    const int64_t row_bytes = s->scale_f16 ? 32 : 64, scales_at = nibbles ? 256 : 512, offsets_at = scales_at + (halves ? 2 : 1) * row_bytes;
    const bool f16 = s->scale_f16, has_offset = s->has_offset;
    const int64_t blocks = s->k / kBlock;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) acc[r][v] = cf_zero();
    for (int64_t b = 0; b < blocks; ++b, panel += s->block_bytes) {
        const ActBlock* rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) rows[r] = x + r * blocks_per_row + b;
        if (R <= 2)  // few rows: bound by memory; the reads run far enough ahead of the arithmetic
            for (int64_t i = 0; i < s->block_bytes; i += 64) __builtin_prefetch(panel + 6144 + i);
#pragma GCC unroll 2
        for (int h = 0; h < (halves ? 2 : 1); ++h) {
            CI dot[R][kVectors];
            if constexpr (nibbles) dots_u4<P, R>(panel, rows, dot);
            else if constexpr (!halves) dots_s8<R, 0, 8>(panel, rows, dot);
            else if (h == 0) dots_s8<R, 0, 4>(panel, rows, dot);
            else dots_s8<R, 4, 8>(panel, rows, dot);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
                const CF scales = load_scales(panel + scales_at + h * row_bytes, v * kLanes, f16);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    acc[r][v] = fold(acc[r][v], dot[r][v], zero, halves ? rows[r]->half_sum[h] : rows[r]->sum, scales, rows[r]->scale);
                if (has_offset) {
                    const CF offset = load_scales(panel + offsets_at + h * row_bytes, v * kLanes, f16);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        acc[r][v] = cf_fma(offset, cf_set1(halves ? rows[r]->half_offset_factor[h] : rows[r]->offset_factor), acc[r][v]);
                }
            }
        }
    }
}

static inline void write_panel(float* out, const float* values, const float* bias, int64_t columns) {
    if (columns == kPanel) {
        const VF v = vf_load(values);
        vf_store(out, bias ? vf_add(v, vf_load(bias)) : v);
    } else {
        const VF v = vf_load(values);
        vf_store_part(out, bias ? vf_add(v, vf_load(bias)) : v, columns);
    }
}

template <Layout L, Rounding P, int R>
static inline void quantized_rows(const Segment* s, int64_t p, const ActBlock* x, int64_t blocks_per_row, const float* bias,
                                  float* out, int64_t out_stride) {
    CF acc[R][kVectors];
    quantized_tile<L, P, R>(s, s->data + p * s->panel_bytes, x, blocks_per_row, acc);
    const int64_t left = s->columns - p * kPanel, columns = left < kPanel ? left : kPanel;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        float values[16];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) cf_store(values + v * kLanes, acc[r][v]);
        write_panel(out + r * out_stride + p * kPanel, values, bias ? bias + p * kPanel : nullptr, columns);
    }
}

// As many tiles of R rows as there are rows left; returns the first row that is still to be done.
template <Layout L, Rounding P, int R>
static inline int64_t quantized_tiles(const Segment* s, int64_t p, const ActBlock* x, int64_t blocks_per_row, int64_t t, int64_t rows,
                                      const float* bias, float* out, int64_t out_stride) {
    for (; t + R <= rows; t += R)
        quantized_rows<L, P, R>(s, p, x + t * blocks_per_row, blocks_per_row, bias, out + t * out_stride, out_stride);
    return t;
}

template <Layout L, Rounding P>
static void quantized_panels(const Segment* s, const ActBlock* x, int64_t blocks_per_row, int64_t rows, int64_t panel0,
                             int64_t panel1, const float* bias, float* out, int64_t out_stride) {
    for (int64_t p = panel0; p < panel1; ++p) {
        int64_t t = quantized_tiles<L, P, kRowTile>(s, p, x, blocks_per_row, 0, rows, bias, out, out_stride);
        if constexpr (kRowTile > 4) t = quantized_tiles<L, P, 4>(s, p, x, blocks_per_row, t, rows, bias, out, out_stride);
        t = quantized_tiles<L, P, 3>(s, p, x, blocks_per_row, t, rows, bias, out, out_stride);
        t = quantized_tiles<L, P, 2>(s, p, x, blocks_per_row, t, rows, bias, out, out_stride);
        quantized_tiles<L, P, 1>(s, p, x, blocks_per_row, t, rows, bias, out, out_stride);
    }
}

static void linear_quantized(const Segment* s, const ActBlock* x, int64_t blocks_per_row, int64_t rows, Rounding rounding,
                             int64_t panel0, int64_t panel1, const float* bias, float* out, int64_t out_stride) {
    constexpr Rounding kWide = Rounding::Wide, kBytes = Rounding::Bytes;
    const auto panels = s->layout == Layout::Q8B32    ? quantized_panels<Layout::Q8B32, kWide>
                        : s->layout == Layout::Q8B16  ? quantized_panels<Layout::Q8B16, kWide>
                        : rounding == Rounding::Bytes ? quantized_panels<Layout::Q4B32, kBytes>
                                                      : quantized_panels<Layout::Q4B32, kWide>;
    panels(s, x, blocks_per_row, rows, panel0, panel1, bias, out, out_stride);
}

template <Layout L> static inline VF load_weights(const uint8_t* panel, int64_t i) {
    if constexpr (L == Layout::F32) return vf_load((const float*)panel + i * kPanel);
    else if constexpr (L == Layout::F16) return vf_load_f16((const uint16_t*)panel + i * kPanel);
    else return vf_load_bf16((const uint16_t*)panel + i * kPanel);
}

// R rows times P panels; R * P = 4 accumulators keep the multipliers busy although each is one chain over k.
template <Layout L, int R, int P>
static inline void float_tile(const Segment* s, int64_t p, const float* x, int64_t stride, const float* bias, float* out,
                              int64_t out_stride) {
    const uint8_t* panel = s->data + p * s->panel_bytes;
    VF acc[R][P];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < P; ++j) acc[r][j] = vf_set1(0.0f);
    for (int64_t i = 0; i < s->k; ++i) {
        VF w[P];
#pragma GCC unroll 4
        for (int j = 0; j < P; ++j) w[j] = load_weights<L>(panel + j * s->panel_bytes, i);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const VF xi = vf_set1(x[r * stride + i]);
#pragma GCC unroll 4
            for (int j = 0; j < P; ++j) acc[r][j] = vf_fma(w[j], xi, acc[r][j]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < P; ++j) {
            const int64_t at = (p + j) * kPanel, left = s->columns - at;
            float values[16];
            vf_store(values, acc[r][j]);
            write_panel(out + r * out_stride + at, values, bias ? bias + at : nullptr, left < kPanel ? left : kPanel);
        }
}

template <Layout L, int R, int P>
static inline int64_t float_panels(const Segment* s, const float* x, int64_t stride, int64_t panel0, int64_t panel1,
                                   const float* bias, float* out, int64_t out_stride) {
    int64_t p = panel0;
    for (; p + P <= panel1; p += P) float_tile<L, R, P>(s, p, x, stride, bias, out, out_stride);
    return p;
}

template <Layout L>
static void float_rows(const Segment* s, const float* x, int64_t stride, int64_t rows, int64_t panel0, int64_t panel1,
                       const float* bias, float* out, int64_t out_stride) {
    int64_t t = 0;
    for (; t + 4 <= rows; t += 4) float_panels<L, 4, 1>(s, x + t * stride, stride, panel0, panel1, bias, out + t * out_stride, out_stride);
    for (; t < rows; ++t) {
        const int64_t p = float_panels<L, 1, 4>(s, x + t * stride, stride, panel0, panel1, bias, out + t * out_stride, out_stride);
        float_panels<L, 1, 1>(s, x + t * stride, stride, p, panel1, bias, out + t * out_stride, out_stride);
    }
}

static void linear_float(const Segment* s, const float* x, int64_t stride, int64_t rows, int64_t panel0, int64_t panel1,
                         const float* bias, float* out, int64_t out_stride) {
    if (s->layout == Layout::F32) float_rows<Layout::F32>(s, x, stride, rows, panel0, panel1, bias, out, out_stride);
    else if (s->layout == Layout::F16) float_rows<Layout::F16>(s, x, stride, rows, panel0, panel1, bias, out, out_stride);
    else float_rows<Layout::BF16>(s, x, stride, rows, panel0, panel1, bias, out, out_stride);
}
