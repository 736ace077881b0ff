#include "packing.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace octavo {

namespace {

int64_t float_bytes(Layout layout) { return layout == Layout::F32 ? 4 : 2; }
int64_t quant_bytes(Layout layout) { return layout == Layout::Q4B32 ? 256 : 512; }
int64_t scales_per_block(Layout layout) { return layout == Layout::Q8B16 ? 2 : 1; }

Segment shape_segment(const PartSource& part) {
    Segment s{};
    s.layout = part.layout;
    s.columns = part.n;
    s.panels = (part.n + kPanel - 1) / kPanel;
    s.k = part.k;
    s.zero = part.zero;
    s.scale_f16 = part.scale_f16;
    s.has_offset = part.offset != nullptr;
    if (is_quantized(part.layout)) {
        s.k = (part.k + kBlock - 1) / kBlock * kBlock;
        const int64_t rows = scales_per_block(part.layout) * (s.has_offset ? 2 : 1);
        s.block_bytes = quant_bytes(part.layout) + rows * kPanel * (part.scale_f16 ? 2 : 4);
        s.panel_bytes = checked_product(s.k / kBlock, s.block_bytes, "a weight");
    } else {
        s.panel_bytes = checked_product(part.k, kPanel * float_bytes(part.layout), "a weight");
    }
    return s;
}

template <typename T> void pack_float_panel(const PartSource& part, int64_t panel, int64_t columns, T* out) {
    for (int64_t c = 0; c < columns; ++c) {
        const T* row = static_cast<const T*>(part.data) + (panel * kPanel + c) * part.data_stride;
        for (int64_t i = 0; i < part.k; ++i) out[i * kPanel + c] = row[i];
    }
}

// `from`: the first of `count` scales that go to column c of a block.
template <typename T> void pack_scales(const void* from, int64_t step, int64_t count, uint8_t* out, int64_t c) {
    for (int64_t h = 0; h < count; ++h) reinterpret_cast<T*>(out)[h * kPanel + c] = static_cast<const T*>(from)[h * step];
}

void pack_block_column(const PartSource& part, const Segment& s, int64_t row, int64_t c, int64_t b, uint8_t* block) {
    // Of 4-bit data, byte j holds elements j and 16 + j: the panel's nibbles pair the same way. A half block comes in fours too.
    const uint8_t* from = static_cast<const uint8_t*>(part.data) + row * part.data_stride + b * part.block_stride;
    const int64_t bytes = s.layout == Layout::Q4B32 ? 16 : std::min(kBlock, part.k - b * kBlock);
    for (int64_t j = 0; j < bytes; j += 4) std::memcpy(block + j * kPanel + c * 4, from + j, 4);
    const int64_t per_block = scales_per_block(s.layout), width = s.scale_f16 ? 2 : 4, first = b * per_block / part.scale_blocks;
    const int64_t count = std::min(per_block, part.k * per_block / kBlock - first * part.scale_blocks);
    uint8_t* scales = block + quant_bytes(s.layout);
    const auto pack = s.scale_f16 ? pack_scales<uint16_t> : pack_scales<uint32_t>;
    const auto at = [&](const void* source, int64_t stride, int64_t step) { return static_cast<const uint8_t*>(source) + (row * stride + first * step) * width; };
    pack(at(part.scale, part.scale_stride, part.scale_step), part.scale_step, count, scales, c);
    if (s.has_offset)
        pack(at(part.offset, part.offset_stride, part.offset_step), part.offset_step, count, scales + per_block * kPanel * width, c);
}

void pack_panel(const PartSource& part, const Segment& s, int64_t p, uint8_t* out) {
    const int64_t columns = std::min(kPanel, part.n - p * kPanel);
    if (part.layout == Layout::F32) return pack_float_panel(part, p, columns, reinterpret_cast<uint32_t*>(out));
    if (!is_quantized(part.layout)) return pack_float_panel(part, p, columns, reinterpret_cast<uint16_t*>(out));
    // A few blocks of all columns at a time: sixteen rows are read in step, and what is written stays in the cache.
    constexpr int64_t kRun = 8;
    const int64_t blocks = s.k / kBlock;
    for (int64_t first = 0; first < blocks; first += kRun)
        for (int64_t c = 0; c < columns; ++c)
            for (int64_t b = first; b < std::min(blocks, first + kRun); ++b)
                pack_block_column(part, s, p * kPanel + c, c, b, out + b * s.block_bytes);
}

float read_scale(const uint8_t* at, bool f16, int64_t index) {
    if (f16) {
        uint16_t h;
        std::memcpy(&h, at + index * 2, 2);
        return f16_to_float(h);
    }
    float f;
    std::memcpy(&f, at + index * 4, 4);
    return f;
}

void dequantize(const Segment& s, int64_t column, int64_t k, float* out) {
    const uint8_t* panel = s.data + column / kPanel * s.panel_bytes;
    const int64_t c = column % kPanel;
    if (!is_quantized(s.layout)) {
        for (int64_t i = 0; i < k; ++i) {
            const int64_t at = i * kPanel + c;
            if (s.layout == Layout::F32) out[i] = reinterpret_cast<const float*>(panel)[at];
            else if (s.layout == Layout::F16) out[i] = f16_to_float(reinterpret_cast<const uint16_t*>(panel)[at]);
            else out[i] = bf16_to_float(reinterpret_cast<const uint16_t*>(panel)[at]);
        }
        return;
    }
    const int64_t halves = scales_per_block(s.layout), scale_bytes = kPanel * (s.scale_f16 ? 2 : 4);
    for (int64_t i = 0; i < k; ++i) {
        const int64_t j = i % kBlock, h = halves == 2 ? j / 16 : 0;
        const uint8_t* block = panel + i / kBlock * s.block_bytes;
        int q;
        if (s.layout == Layout::Q4B32) {
            const int byte = block[j % 16 / 4 * 64 + c * 4 + j % 4];
            q = j < 16 ? byte & 15 : byte >> 4;
        } else {
            q = int8_t(block[j / 4 * 64 + c * 4 + j % 4]);
        }
        const uint8_t* scales = block + quant_bytes(s.layout) + h * scale_bytes;
        out[i] = read_scale(scales, s.scale_f16, c) * float(q - s.zero);
        if (s.has_offset) out[i] += read_scale(scales + halves * scale_bytes, s.scale_f16, c);
    }
}

}  // namespace

PackedWeight::PackedWeight(int64_t k) : k_(k) {
    if (k < 1) throw std::invalid_argument("a weight needs at least one input");
}

void PackedWeight::add(const PartSource& part, ThreadPool& pool) {
    if (part.n < 1 || part.k != k_) throw std::invalid_argument("parts of a weight must have rows, and the same K");
    Segment s = shape_segment(part);
    Memory memory(checked_product(s.panels, s.panel_bytes, "a weight"), "a weight");
    uint8_t* data = memory.data();
    s.data = data;
    // Runs of panels of some megabytes: two threads that enter a huge page at once would both clear it, and one in vain.
    const int64_t run = std::clamp<int64_t>((int64_t(8) << 20) / s.panel_bytes, 1, (s.panels + pool.threads() - 1) / pool.threads());
    pool.run((s.panels + run - 1) / run, [&](int64_t i) {
        for (int64_t p = i * run; p < std::min(s.panels, (i + 1) * run); ++p) pack_panel(part, s, p, data + p * s.panel_bytes);
    });
    memory_.push_back(std::move(memory));
    segments_.push_back(s);
    columns_ += part.n;
}

void PackedWeight::set_bias(const float* bias, int64_t count) {
    if (count != columns_) throw std::invalid_argument("bias must have one value per output column");
    bias_.clear();
    for (const Segment& s : segments_) {
        bias_.emplace_back(size_t(s.panels * kPanel), 0.0f);
        std::copy(bias, bias + s.columns, bias_.back().begin());
        bias += s.columns;
    }
}

void PackedWeight::dequantize_column(int64_t column, float* out) const {
    for (const Segment& s : segments_) {
        if (column < s.columns) return dequantize(s, column, k_, out);
        column -= s.columns;
    }
}

int64_t PackedWeight::bytes() const {
    int64_t sum = 0;
    for (const Memory& memory : memory_) sum += memory.size();
    return sum;
}

}  // namespace octavo
