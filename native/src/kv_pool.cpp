#include "kv_pool.h"

#include <cstring>
#include <stdexcept>

#include "half.h"
#include "quantize.h"

namespace octavo {

namespace {

int64_t padded(int64_t dim) { return (dim + kPanel - 1) / kPanel * kPanel; }
int64_t item_bytes(KvType type) { return type == KvType::F32 ? 4 : type == KvType::I8 ? 1 : 2; }
int64_t bytes_of_tile(const KvShape& s) { return padded(s.head_dim) * kTokens * item_bytes(s.type); }
int64_t bytes_of_head(const KvShape& s) { return 2 * bytes_of_tile(s) + (s.type == KvType::I8 ? 2 * kTokens * int64_t(sizeof(uint16_t)) : 0); }

// How a number is kept. scale: of its vector, 1 for types that have none.
template <KvType K> struct Item;
template <> struct Item<KvType::F32> {
    using type = float;
    static constexpr bool scaled = false, paired = false;
    static float pack(float x, float) { return x; }
    static float unpack(float x, float) { return x; }
    static int64_t index(int64_t row, int64_t column, int64_t width) { return row * width + column; }
};
template <> struct Item<KvType::BF16> {
    using type = uint16_t;
    static constexpr bool scaled = false, paired = true;
    static uint16_t pack(float x, float) { return float_to_bf16(x); }
    static float unpack(uint16_t x, float) { return bf16_to_float(x); }
    static int64_t index(int64_t row, int64_t column, int64_t width) { return (row / 2 * width + column) * 2 + row % 2; }
};
template <> struct Item<KvType::F16> : Item<KvType::BF16> {
    static uint16_t pack(float x, float) { return float_to_f16(x); }
    static float unpack(uint16_t x, float) { return f16_to_float(x); }
};
template <> struct Item<KvType::I8> : Item<KvType::F32> {
    using type = int8_t;
    static constexpr bool scaled = true;
    static int8_t pack(float x, float scale) { return to_int8(x, scale); }
    static float unpack(int8_t x, float scale) { return float(x) * scale; }
};

// Calls f with an Item of the run-time type.
template <typename F> void with_type(KvType type, const F& f) {
    if (type == KvType::F32) f(Item<KvType::F32>{});
    else if (type == KvType::BF16) f(Item<KvType::BF16>{});
    else if (type == KvType::F16) f(Item<KvType::F16>{});
    else f(Item<KvType::I8>{});
}

// The tile of K or V of one KV head in one block, token by token.
template <typename I> struct Tile {
    typename I::type* items;
    uint16_t* scales;
    int64_t width;  // of a V tile; 0: a K tile

    Tile(uint8_t* head, const KvPool& pool, bool is_value)
        : items(reinterpret_cast<typename I::type*>(head + (is_value ? pool.value_offset() : 0))),
          scales(reinterpret_cast<uint16_t*>(head + pool.scale_offset()) + (is_value ? kTokens : 0)),
          width(is_value ? pool.padded_dim() : 0) {}

    int64_t index(int64_t token, int64_t d) const { return width ? I::index(token, d, width) : I::index(d, token, kTokens); }

    void write(int64_t token, const float* x, int64_t dim) {
        float scale = 1.0f;
        if constexpr (I::scaled) {
            scale = int8_scale(x, dim);
            scales[token] = float_to_bf16(scale);
        }
        // Packed first, in a loop the compiler can vectorise, then put where it goes: pairs of a K tile in one piece.
        typename I::type packed[kMaxHeadDim];
        for (int64_t d = 0; d < dim; ++d) packed[d] = I::pack(x[d], scale);
        typename I::type* to = items + index(token, 0);
        if (width == 0 && I::paired) {
            for (int64_t d = 0; d < dim; d += 2) std::memcpy(to + d * kTokens, packed + d, 2 * sizeof(packed[0]));
        } else {
            const int64_t stride = width == 0 ? kTokens : I::paired ? 2 : 1;
            for (int64_t d = 0; d < dim; ++d) to[d * stride] = packed[d];
        }
    }

    void read(int64_t token, float* x, int64_t dim) const {
        float scale = 1.0f;
        if constexpr (I::scaled) scale = bf16_to_float(scales[token]);
        for (int64_t d = 0; d < dim; ++d) x[d] = I::unpack(items[index(token, d)], scale);
    }
};

}  // namespace

int64_t KvPool::bytes_per_block(const KvShape& s) {
    if (s.layers < 1 || s.kv_heads < 1) throw std::invalid_argument("a KV pool needs at least one layer and one KV head");
    if (s.head_dim < 8 || s.head_dim > kMaxHeadDim || s.head_dim % 2)
        throw std::invalid_argument("head_dim must be even and between 8 and 256, got " + std::to_string(s.head_dim));
    return checked_product(s.layers, checked_product(s.kv_heads, bytes_of_head(s), "a KV block"), "a KV block");
}

KvPool::KvPool(const KvShape& shape) : shape_(shape) {
    if (shape.blocks < 1) throw std::invalid_argument("a KV pool needs at least one block");
    const int64_t bytes = checked_product(shape.blocks, bytes_per_block(shape), "the KV pool");
    padded_dim_ = padded(shape.head_dim);
    tile_bytes_ = bytes_of_tile(shape);
    head_bytes_ = bytes_of_head(shape);
    memory_ = Memory(bytes, "the KV pool (lower kv_cache_memory)");
}

void KvPool::write(int64_t layer_index, int64_t slot, int64_t kv_head, const float* k, const float* v) {
    uint8_t* head = layer(layer_index) + slot / kTokens * block_bytes() + kv_head * head_bytes_;
    with_type(shape_.type, [&]<typename I>(I) {
        Tile<I>(head, *this, false).write(slot % kTokens, k, shape_.head_dim);
        Tile<I>(head, *this, true).write(slot % kTokens, v, shape_.head_dim);
    });
}

void KvPool::copy_block(int64_t source, int64_t target) {
    for (int64_t l = 0; l < shape_.layers; ++l)
        std::memcpy(layer(l) + target * block_bytes(), layer(l) + source * block_bytes(), size_t(block_bytes()));
}

// Calls f(tile, values) for K and V of every layer and KV head of a block; values: where the tile's 16 tokens begin in [layers,
// 2, kv_heads, 16, head_dim].
template <typename I, typename T, typename F> void KvPool::each_tile(int64_t block, T* values, const F& f) const {
    for (int64_t l = 0; l < shape_.layers; ++l)
        for (int64_t is_value = 0; is_value < 2; ++is_value)
            for (int64_t h = 0; h < shape_.kv_heads; ++h, values += kTokens * shape_.head_dim)
                f(Tile<I>(layer(l) + block * block_bytes() + h * head_bytes_, *this, is_value), values);
}

void KvPool::export_block(int64_t block, float* out) const {
    const int64_t dim = shape_.head_dim;
    with_type(shape_.type, [&]<typename I>(I) {
        each_tile<I>(block, out, [&](const Tile<I>& tile, float* values) {
            for (int64_t t = 0; t < kTokens; ++t) tile.read(t, values + t * dim, dim);
        });
    });
}

void KvPool::import_block(int64_t block, const float* in) {
    const int64_t dim = shape_.head_dim;
    with_type(shape_.type, [&]<typename I>(I) {
        each_tile<I>(block, in, [&](Tile<I> tile, const float* values) {
            for (int64_t t = 0; t < kTokens; ++t) tile.write(t, values + t * dim, dim);
        });
    });
}

}  // namespace octavo
