// Weights in the layout the kernels read: panels of 16 output columns, one after the other.
//
//   quantised layouts: a panel is K / 32 blocks, each
//     4-bit   [4][16 columns][4] bytes: group j holds inputs 4j..4j+3 in the low nibbles, 16+4j..16+4j+3 in the high
//     8-bit   [8][16 columns][4] signed bytes: group j holds inputs 4j..4j+3
//     scales  [16], or [2][16] for Q8B16: halves where the source has halves (exact), else floats
//     offsets as scales, where there are any
//   float layouts: a panel is [K][16] values of the source's type
//
// Columns past the end of the last panel are zero. K of quantised layouts is padded with zero scales to a multiple of 32.
// Every level reads the same bytes.
#pragma once
#include <vector>

#include "memory.h"
#include "thread_pool.h"
#include "types.h"

namespace octavo {

// A matrix as the loader hands it over (PackedTensor in octavo/ops/api.py). Strides in elements: along N, and from one
// block of 32 (for scales: from one scale) to the next, so that the blocks of a file are read where they lie.
//
// Groups of 128 arrive as Q4B32 or Q8B32 with scale_blocks = 4: a group's scale is repeated for each of its blocks. A
// kernel that reads one scale a group would have a layout of its own, and end this.
struct PartSource {
    Layout layout;
    int64_t n, k;
    const void* data;
    int64_t data_stride;
    const void* scale = nullptr;
    const void* offset = nullptr;
    int64_t scale_stride = 0, offset_stride = 0;
    int64_t block_stride = 0, scale_step = 1, offset_step = 1;
    int64_t scale_blocks = 1;
    bool scale_f16 = false;
    int32_t zero = 0;
};

// A weight of one or several parts that share K; part i's columns follow part i - 1's.
class PackedWeight {
public:
    explicit PackedWeight(int64_t k);
    PackedWeight(const PackedWeight&) = delete;
    PackedWeight& operator=(const PackedWeight&) = delete;
    void add(const PartSource& part, ThreadPool& pool);
    // float [columns()], copied.
    void set_bias(const float* bias, int64_t count);

    // Row `column` of the matrix, dequantised: scale * (q - zero) + offset, in that order.
    void dequantize_column(int64_t column, float* out) const;

    int64_t k() const { return k_; }
    int64_t columns() const { return columns_; }
    int64_t bytes() const;
    const std::vector<Segment>& segments() const { return segments_; }
    // Bias of a segment's column 0, padded to whole panels; nullptr without bias.
    const float* bias(size_t segment) const { return bias_.empty() ? nullptr : bias_[segment].data(); }

private:
    int64_t k_, columns_ = 0;
    std::vector<Segment> segments_;
    std::vector<Memory> memory_;
    std::vector<std::vector<float>> bias_;
};

inline bool is_quantized(Layout layout) { return layout >= Layout::Q4B32; }

}  // namespace octavo
