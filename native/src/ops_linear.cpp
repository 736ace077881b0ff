// Matrix products and the embedding: checks, quantisation of the rows, and the division of work.
#include <algorithm>

#include "context.h"

namespace octavo {

namespace {
// Rows quantised at a time, so that scratch stays small and in cache whatever the length of a prompt.
constexpr int64_t kMicroBatch = 512;
// Rows that one item runs over a chunk of panels: their quantised form fits in the second-level cache.
constexpr int64_t kRowChunk = 64;
}  // namespace

void Context::pack_part(PackedWeight& weight, const PartSource& part) {
    const std::lock_guard lock(mutex_);
    weight.add(part, pool_);
}

void Context::linear(In x, const PackedWeight& weight, Out out) {
    require(x.cols == weight.k(), "linear: x must have K columns");
    require(out.rows == x.rows && out.cols == weight.columns(), "linear: out must be [rows of x, N]");
    const std::lock_guard lock(mutex_);
    for (int64_t t = 0; t < x.rows; t += kMicroBatch) {
        const int64_t rows = std::min(kMicroBatch, x.rows - t);
        linear_rows({x.data + t * x.stride, rows, x.cols, x.stride}, weight, {out.data + t * out.stride, rows, out.cols, out.stride});
    }
}

void Context::linear_rows(In x, const PackedWeight& weight, Out out) {
    const int64_t blocks = (x.cols + kBlock - 1) / kBlock;
    ActBlock* quantized = nullptr;
    if (weight.quantized()) {
        quantized = reinterpret_cast<ActBlock*>(scratch(x.rows * blocks * int64_t(sizeof(ActBlock))));
        each_rows(x.rows, x.cols, [&](int64_t a, int64_t b) {
            kernels_.quantize_rows(x.data + a * x.stride, x.stride, b - a, x.cols, quantized + a * blocks);
        });
    }
    int64_t panels = 0;
    for (const Segment& s : weight.segments()) panels += s.panels;
    // About eight items per thread, of whole groups of four panels; one item when there is next to nothing to do.
    const bool tiny = x.rows * x.cols * weight.columns() < 32768;
    const int64_t wanted = tiny ? 1 : 8 * pool_.threads(), row_chunks = (x.rows + kRowChunk - 1) / kRowChunk;
    const int64_t per_item = std::max<int64_t>(4, (panels * row_chunks / wanted + 3) / 4 * 4);
    const int64_t panel_chunks = tiny ? 1 : (panels + per_item - 1) / per_item;
    pool_.run(panel_chunks * row_chunks, [&](int64_t item) {
        const int64_t t = item % row_chunks * kRowChunk, rows = std::min(kRowChunk, x.rows - t);
        const int64_t first = tiny ? 0 : item / row_chunks * per_item, last = tiny ? panels : std::min(panels, first + per_item);
        int64_t panel = 0, column = 0;
        for (size_t i = 0; i < weight.segments().size(); ++i) {
            const Segment& s = weight.segments()[i];
            const int64_t a = std::max(first - panel, int64_t(0)), b = std::min(last - panel, s.panels);
            float* to = out.data + t * out.stride + column;
            if (a < b && is_quantized(s.layout))
                kernels_.linear_quantized(&s, quantized + t * blocks, blocks, rows, a, b, weight.bias(i), to, out.stride);
            else if (a < b)
                kernels_.linear_float(&s, x.data + t * x.stride, x.stride, rows, a, b, weight.bias(i), to, out.stride);
            panel += s.panels;
            column += s.columns;
        }
    });
}

void Context::embedding(Vector<const int32_t> ids, const PackedWeight& weight, Out out) {
    require(out.rows == ids.size && out.cols == weight.k(), "embedding: out must be [ids, K]");
    for (int64_t i = 0; i < ids.size; ++i)
        if (ids.data[i] < 0 || ids.data[i] >= weight.columns())
            throw std::out_of_range("embedding: token id " + std::to_string(ids.data[i]) + " is outside the vocabulary");
    const std::lock_guard lock(mutex_);
    each_rows(ids.size, out.cols * 4, [&](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; ++t) weight.dequantize_column(ids.data[t], out.data + t * out.stride);
    });
}

}  // namespace octavo
