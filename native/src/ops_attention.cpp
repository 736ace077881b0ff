// Rotary embedding with KV write, and paged attention: checks and the division of work.
#include <algorithm>

#include "context.h"

namespace octavo {

namespace {

// x [dim] -> out, pairs (i, i + half) turned by the position's angle; dimensions past 2 * half are copied. No fused
// operations: the same bits at every level.
void rotate(const float* __restrict x, const float* __restrict cos, const float* __restrict sin, int64_t half, int64_t dim, float* __restrict out) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i] + a * sin[i];
    }
    for (int64_t i = 2 * half; i < dim; ++i) out[i] = x[i];
}

void check_layer(const KvPool& kv, int64_t layer) {
    if (layer < 0 || layer >= kv.shape().layers) throw std::out_of_range("layer " + std::to_string(layer) + " is outside the KV pool");
}

}  // namespace

void Context::rope_kv_write(In qkv, const RopeTable& rope, KvPool& kv, int64_t layer, Vector<const int32_t> positions,
                            Vector<const int64_t> slots, int64_t num_heads, Out q) {
    const int64_t dim = kv.shape().head_dim, kv_heads = kv.shape().kv_heads;
    check_layer(kv, layer);
    require(num_heads > 0 && num_heads < (1 << 20) && num_heads % kv_heads == 0, "rope_kv_write: num_heads must be a multiple of the KV heads");
    require(qkv.cols == (num_heads + 2 * kv_heads) * dim, "rope_kv_write: qkv must have (H + 2 KH) * D columns");
    require(q.rows == qkv.rows && q.cols == num_heads * dim, "rope_kv_write: out must be [T, H * D]");
    require(positions.size == qkv.rows && slots.size == qkv.rows, "rope_kv_write: one position and one slot per row are needed");
    require(2 * rope.half <= dim, "rope_kv_write: the rotary table is wider than the heads");
    for (int64_t t = 0; t < qkv.rows; ++t) {
        if (positions.data[t] < 0 || positions.data[t] >= rope.max_position)
            throw std::out_of_range("rope_kv_write: position " + std::to_string(positions.data[t]) + " is outside the rotary table");
        if (slots.data[t] < 0 || slots.data[t] >= kv.slots())
            throw std::out_of_range("rope_kv_write: slot " + std::to_string(slots.data[t]) + " is outside the KV pool");
    }
    const std::lock_guard lock(mutex_);
    // Every number is turned, rounded and scattered: four times the work of one that is only read and written.
    each_rows(qkv.rows, 4 * qkv.cols, [&](int64_t a, int64_t b) {
        float turned[kMaxHeadDim];
        for (int64_t t = a; t < b; ++t) {
            const float* row = qkv.data + t * qkv.stride;
            const float* cos = rope.cos.data() + positions.data[t] * rope.half;
            const float* sin = rope.sin.data() + positions.data[t] * rope.half;
            for (int64_t h = 0; h < num_heads; ++h) rotate(row + h * dim, cos, sin, rope.half, dim, q.data + t * q.stride + h * dim);
            const float *keys = row + num_heads * dim, *values = keys + kv_heads * dim;
            for (int64_t h = 0; h < kv_heads; ++h) {
                rotate(keys + h * dim, cos, sin, rope.half, dim, turned);
                kv.write(layer, slots.data[t], h, turned, values + h * dim);
            }
        }
    });
}

namespace {

// Keys below this position are hidden from position p by the window.
int64_t lowest_key(int64_t p, int64_t window) { return window > p ? 0 : p - window + 1; }

void check_batch(const AttendBatch& batch, int64_t rows, int64_t blocks, int64_t window) {
    const auto& start = batch.query_start_loc;
    require(batch.positions.size == rows, "attend: one position per row is needed");
    require(start.size >= 1 && start.data[0] == 0 && start.data[start.size - 1] == rows, "attend: query_start_loc must run from 0 to the number of rows");
    require(batch.block_table.rows == start.size - 1, "attend: one block table per segment is needed");
    for (int64_t s = 0; s + 1 < start.size; ++s) {
        const int64_t a = start.data[s], b = start.data[s + 1];
        require(a <= b && b <= rows, "attend: query_start_loc must not decrease");
        if (a == b) continue;
        for (int64_t t = a; t < b; ++t)
            require(batch.positions.data[t] >= 0 && int64_t(batch.positions.data[t]) == batch.positions.data[a] + (t - a),
                    "attend: positions of a segment must be consecutive and not negative");
        const int64_t first = lowest_key(batch.positions.data[a], window) / kTokens, last = batch.positions.data[b - 1] / kTokens;
        if (last >= batch.block_table.cols) throw std::out_of_range("attend: a block table is shorter than its sequence");
        const int32_t* table = batch.block_table.data + s * batch.block_table.stride;
        for (int64_t i = first; i <= last; ++i)
            if (table[i] < 0 || table[i] >= blocks) throw std::out_of_range("attend: block " + std::to_string(table[i]) + " is outside the KV pool");
    }
}

struct Splits {
    int64_t first, last;
};

Splits splits_of(const AttendJob& job, const AttendTile& tile) {
    const int64_t low = job.positions[tile.row + tile.first / job.group], high = job.positions[tile.row + (tile.last - 1) / job.group];
    return {lowest_key(low, job.window) / kSplit, high / kSplit + 1};
}

}  // namespace

void Context::attend(In q, const KvPool& kv, int64_t layer, const AttendBatch& batch, const AttendOptions& options, Out out) {
    const int64_t dim = kv.shape().head_dim, kv_heads = kv.shape().kv_heads, heads = q.cols / dim;
    check_layer(kv, layer);
    require(q.cols > 0 && q.cols % dim == 0 && heads % kv_heads == 0, "attend: q must be [T, H, D] with H a multiple of the KV heads");
    require(out.rows == q.rows && out.cols == q.cols, "attend: out must be [T, H * D]");
    require(options.window >= 0, "attend: window must be positive");
    require(options.softcap >= 0.0f, "attend: softcap must not be negative");
    const int64_t window = options.window > 0 ? options.window : INT64_MAX;
    check_batch(batch, q.rows, kv.shape().blocks, window);

    AttendJob job{};
    job.layer = kv.layer(layer);
    job.block_bytes = kv.block_bytes();
    job.head_bytes = kv.head_bytes();
    job.value_offset = kv.value_offset();
    job.scale_offset = kv.scale_offset();
    job.type = kv.shape().type;
    job.head_dim = dim;
    job.padded_dim = kv.padded_dim();
    job.group = heads / kv_heads;
    job.q = q.data;
    job.q_stride = q.stride;
    job.out = out.data;
    job.out_stride = out.stride;
    job.positions = batch.positions.data;
    job.scale = options.scale;
    job.softcap = options.softcap;
    job.window = window;

    const std::lock_guard lock(mutex_);
    tiles_.clear();
    for (int64_t s = 0; s + 1 < batch.query_start_loc.size; ++s) {
        const int64_t row = batch.query_start_loc.data[s], queries = (batch.query_start_loc.data[s + 1] - row) * job.group;
        const int32_t* table = batch.block_table.data + s * batch.block_table.stride;
        for (int64_t first = 0; first < queries; first += kTileQueries)
            for (int64_t head = 0; head < kv_heads; ++head)
                tiles_.push_back({row, first, std::min(queries, first + kTileQueries), head, table});
    }
    attend_tiles(job);
}

// A thread takes whole tiles, the longest prefixes of a segment first. A tile with more work than a quarter of a thread's share (a long
// context in a small batch, or beside short ones) is divided into its splits, whose states are folded in order
// afterwards. The kernels fold a split the same way in both cases, to the bit.
void Context::attend_tiles(const AttendJob& job) {
    const int64_t state = job.padded_dim + kPanel;
    const auto queries_of = [](const AttendTile& tile) { return tile.last - tile.first; };
    int64_t work = 0, floats = 0;
    for (const AttendTile& tile : tiles_) {
        const Splits splits = splits_of(job, tile);
        work += (splits.last - splits.first) * queries_of(tile);
    }
    items_.clear();
    divided_.clear();
    for (size_t i = tiles_.size(); i-- > 0;) {
        const AttendTile& tile = tiles_[i];
        const Splits splits = splits_of(job, tile);
        const int64_t count = splits.last - splits.first;
        if (pool_.threads() == 1 || count == 1 || count * queries_of(tile) * 4 * pool_.threads() <= work) {
            items_.push_back({i, splits.first, splits.last, -1});
            continue;
        }
        divided_.push_back({i, splits.first, splits.last, floats});
        for (int64_t s = splits.first; s < splits.last; ++s, floats += queries_of(tile) * state) items_.push_back({i, s, s + 1, floats});
    }
    float* states = floats > 0 ? reinterpret_cast<float*>(scratch(floats * int64_t(sizeof(float)))) : nullptr;
    pool_.run(int64_t(items_.size()), [&](int64_t number) {
        const AttendItem& item = items_[size_t(number)];
        const AttendTile& tile = tiles_[item.tile];
        if (item.state >= 0) return kernels_.attend_splits(&job, &tile, item.first_split, item.last_split, states + item.state);
        alignas(64) float memory[kTileQueries * (kMaxHeadDim + kPanel)];
        kernels_.attend_splits(&job, &tile, item.first_split, item.last_split, memory);
        kernels_.attend_finish(&job, &tile, memory);
    });
    for (const AttendItem& item : divided_) {
        const AttendTile& tile = tiles_[item.tile];
        float* first = states + item.state;
        for (int64_t s = 1; s < item.last_split - item.first_split; ++s)
            kernels_.attend_merge(&job, queries_of(tile), first, first + s * queries_of(tile) * state);
        kernels_.attend_finish(&job, &tile, first);
    }
}

}  // namespace octavo
