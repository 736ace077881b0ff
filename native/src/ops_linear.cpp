// Matrix products and the embedding: checks, quantisation of the rows, and the division of work.
#include <algorithm>
#include <cstring>

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

void Context::linear(In x, const PackedWeight& weight, int64_t num_generated, Out out, const RowTask& before) {
    require(weight.columns() > 0, "linear: the weight has no columns");
    require(x.cols == weight.k(), "linear: x must have K columns");
    require(out.rows == x.rows && out.cols == weight.columns(), "linear: out must be [rows of x, N]");
    require(num_generated >= 0 && num_generated <= x.rows, "linear: num_generated must be between 0 and the rows of x");
    const std::lock_guard lock(mutex_);
    const bool several = x.rows > kMicroBatch;  // out may lie where the rows of a later micro-batch are still to be made from
    if (before && several) each_rows(x.rows, 4 * x.cols, before);
    for (int64_t t = 0; t < x.rows; t += kMicroBatch) {
        const int64_t rows = std::min(kMicroBatch, x.rows - t), generated = std::clamp(num_generated - t, int64_t(0), rows);
        linear_rows({x.data + t * x.stride, rows, x.cols, x.stride}, weight, generated, {out.data + t * out.stride, rows, out.cols, out.stride},
                    several ? RowTask() : before);
    }
}

// The rows of a micro-batch as the weight's kernels take them. As integers: generated rows as bytes for 4-bit weights, whatever
// else is asked for wide. As tiles of bfloat16: prompt rows, where the level has kernels for them.
Context::Rounded Context::round(In x, const PackedWeight& weight, int64_t generated, const RowTask& before) {
    bool four_bits = false, others = false, tiled = false;
    for (const Segment& s : weight.segments()) {
        four_bits |= s.layout == Layout::Q4B32;
        others |= is_quantized(s.layout) && s.layout != Layout::Q4B32;
        tiled |= in_tiles(s.layout);
    }
    if (!four_bits && !others && !tiled) {
        if (before) each_rows(x.rows, 4 * x.cols, before);
        return {};
    }
    const int64_t blocks = (x.cols + kBlock - 1) / kBlock, num_bytes = four_bits ? generated : 0;
    const int64_t first_wide = others ? 0 : generated, num_wide = !four_bits && !others ? 0 : tiled ? generated : x.rows;
    const int64_t first_tiled = tiled ? generated : x.rows, row_tiles = (x.rows - first_tiled + kTileRows - 1) / kTileRows;
    const int64_t act_bytes = (num_bytes + num_wide) * blocks * int64_t(sizeof(ActBlock)), tile_bytes = blocks * kBlock * kTileRows * int64_t(sizeof(uint16_t));
    const int64_t tiles_at = (act_bytes + 63) / 64 * 64;
    uint8_t* memory = scratch(tiles_at + row_tiles * tile_bytes);
    ActBlock* bytes = reinterpret_cast<ActBlock*>(memory);
    ActBlock* wide = bytes + num_bytes * blocks;
    uint16_t* tiles = reinterpret_cast<uint16_t*>(memory + tiles_at);
    if ((x.rows - first_tiled) % kTileRows) std::memset(memory + tiles_at + (row_tiles - 1) * tile_bytes, 0, size_t(tile_bytes));
    each_rows(x.rows, 4 * x.cols, [&](int64_t a, int64_t b) {
        if (before) before(a, b);
        const auto rows = [&](int64_t from, int64_t to, Rounding rounding, ActBlock* out) {
            if (from < to) kernels_.quantize_rows(x.data + from * x.stride, x.stride, to - from, x.cols, rounding, out + from * blocks);
        };
        rows(a, std::min(b, num_bytes), Rounding::Bytes, bytes);
        rows(std::max(a, first_wide), std::min(b, num_wide), Rounding::Wide, wide);
        const int64_t from = std::max(a, first_tiled);
        if (from < b) kernels_.prompt.round_rows(x.data + from * x.stride, x.stride, from - first_tiled, b - from, x.cols, tiles);
    });
    return {bytes, wide, tiles, blocks};
}

void Context::linear_rows(In x, const PackedWeight& weight, int64_t generated, Out out, const RowTask& before) {
    const Rounded rounded = round(x, weight, generated, before);
    int64_t panels = 0;
    for (const Segment& s : weight.segments()) panels += s.panels;
    // A chunk of rows is of one kind. About eight items per thread, of whole groups of four panels; one item per chunk of
    // rows when there is next to nothing to do.
    const int64_t prompt_chunk = kernels_.prompt.linear ? kPromptRows : kRowChunk, generated_chunks = (generated + kRowChunk - 1) / kRowChunk;
    const int64_t row_chunks = generated_chunks + (x.rows - generated + prompt_chunk - 1) / prompt_chunk;
    const bool tiny = x.rows * x.cols * weight.columns() < 32768;
    const int64_t per_item = tiny ? panels : std::max<int64_t>(4, (panels * row_chunks / (8 * pool_.threads()) + 3) / 4 * 4);
    const int64_t panel_chunks = (panels + per_item - 1) / per_item;
    pool_.run(panel_chunks * row_chunks, [&](int64_t item) {
        const int64_t chunk = item % row_chunks;
        const bool is_generated = chunk < generated_chunks;
        const int64_t t = is_generated ? chunk * kRowChunk : generated + (chunk - generated_chunks) * prompt_chunk;
        const int64_t rows = is_generated ? std::min(kRowChunk, generated - t) : std::min(prompt_chunk, x.rows - t);
        const int64_t first = item / row_chunks * per_item, last = std::min(panels, first + per_item);
        int64_t panel = 0, column = 0;
        for (size_t i = 0; i < weight.segments().size(); ++i) {
            const Segment& s = weight.segments()[i];
            const int64_t a = std::max(first - panel, int64_t(0)), b = std::min(last - panel, s.panels);
            const Rounding rounding = is_generated && s.layout == Layout::Q4B32 ? Rounding::Bytes : Rounding::Wide;
            float* to = out.data + t * out.stride + column;
            if (a < b && !is_generated && in_tiles(s.layout)) {
                const uint16_t* from = rounded.tiles + (t - generated) * rounded.blocks * kBlock;
                kernels_.prompt.linear(&s, from, rows, a, b, weight.bias(i), to, out.stride);
            } else if (a < b && is_quantized(s.layout)) {
                const ActBlock* from = (rounding == Rounding::Bytes ? rounded.bytes : rounded.wide) + t * rounded.blocks;
                kernels_.linear_quantized(&s, from, rounded.blocks, rows, rounding, a, b, weight.bias(i), to, out.stride);
            } else if (a < b) {
                kernels_.linear_float(&s, x.data + t * x.stride, x.stride, rows, a, b, weight.bias(i), to, out.stride);
            }
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
