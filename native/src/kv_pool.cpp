#include "kv_pool.h"

#include <cstring>
#include <stdexcept>

#include "half.h"

namespace octavo {

namespace {

int64_t padded(int64_t dim) { return (dim + kPanel - 1) / kPanel * kPanel; }
int64_t item_bytes(KvType type) { return type == KvType::F32 ? 4 : 2; }

template <KvType K> struct Item;
template <> struct Item<KvType::F32> {
    using type = float;
    static float pack(float x) { return x; }
    static float unpack(float x) { return x; }
    static int64_t index(int64_t row, int64_t column, int64_t width) { return row * width + column; }
};
template <> struct Item<KvType::BF16> {
    using type = uint16_t;
    static uint16_t pack(float x) { return float_to_bf16(x); }
    static float unpack(uint16_t x) { return bf16_to_float(x); }
    static int64_t index(int64_t row, int64_t column, int64_t width) { return (row / 2 * width + column) * 2 + row % 2; }
};
template <> struct Item<KvType::F16> : Item<KvType::BF16> {
    static uint16_t pack(float x) { return float_to_f16(x); }
    static float unpack(uint16_t x) { return f16_to_float(x); }
};

// Calls f with an Item of the run-time type.
template <typename F> void with_type(KvType type, const F& f) {
    if (type == KvType::F32) f(Item<KvType::F32>{});
    else if (type == KvType::BF16) f(Item<KvType::BF16>{});
    else f(Item<KvType::F16>{});
}

}  // namespace

int64_t KvPool::bytes_per_block(const KvShape& s) {
    if (s.layers < 1 || s.kv_heads < 1) throw std::invalid_argument("a KV pool needs at least one layer and one KV head");
    if (s.head_dim < 8 || s.head_dim > kMaxHeadDim || s.head_dim % 2)
        throw std::invalid_argument("head_dim must be even and between 8 and 256, got " + std::to_string(s.head_dim));
    const int64_t head = 2 * padded(s.head_dim) * kTokens * item_bytes(s.type);
    return checked_product(s.layers, checked_product(s.kv_heads, head, "a KV block"), "a KV block");
}

KvPool::KvPool(const KvShape& shape) : shape_(shape) {
    if (shape.blocks < 1) throw std::invalid_argument("a KV pool needs at least one block");
    const int64_t bytes = checked_product(shape.blocks, bytes_per_block(shape), "the KV pool");
    padded_dim_ = padded(shape.head_dim);
    head_bytes_ = 2 * padded_dim_ * kTokens * item_bytes(shape.type);
    memory_ = Memory(bytes, "the KV pool (lower kv_cache_memory)");
}

void KvPool::write(int64_t layer_index, int64_t slot, int64_t kv_head, const float* k, const float* v) {
    uint8_t* tile = layer(layer_index) + slot / kTokens * block_bytes() + kv_head * head_bytes_;
    const int64_t token = slot % kTokens;
    with_type(shape_.type, [&]<typename I>(I) {
        auto* keys = reinterpret_cast<typename I::type*>(tile);
        auto* values = reinterpret_cast<typename I::type*>(tile + value_offset());
        for (int64_t d = 0; d < shape_.head_dim; ++d) {
            keys[I::index(d, token, kTokens)] = I::pack(k[d]);
            values[I::index(token, d, padded_dim_)] = I::pack(v[d]);
        }
    });
}

void KvPool::copy_block(int64_t source, int64_t target) {
    for (int64_t l = 0; l < shape_.layers; ++l)
        std::memcpy(layer(l) + target * block_bytes(), layer(l) + source * block_bytes(), size_t(block_bytes()));
}

void KvPool::export_block(int64_t block, float* out) const {
    with_type(shape_.type, [&]<typename I>(I) {
        for (int64_t l = 0; l < shape_.layers; ++l)
            for (int64_t is_value = 0; is_value < 2; ++is_value)
                for (int64_t h = 0; h < shape_.kv_heads; ++h) {
                    const uint8_t* tile = layer(l) + block * block_bytes() + h * head_bytes_ + is_value * value_offset();
                    const auto* items = reinterpret_cast<const typename I::type*>(tile);
                    for (int64_t t = 0; t < kTokens; ++t)
                        for (int64_t d = 0; d < shape_.head_dim; ++d)
                            *out++ = I::unpack(items[is_value ? I::index(t, d, padded_dim_) : I::index(d, t, kTokens)]);
                }
    });
}

void KvPool::import_block(int64_t block, const float* in) {
    with_type(shape_.type, [&]<typename I>(I) {
        for (int64_t l = 0; l < shape_.layers; ++l)
            for (int64_t is_value = 0; is_value < 2; ++is_value)
                for (int64_t h = 0; h < shape_.kv_heads; ++h) {
                    uint8_t* tile = layer(l) + block * block_bytes() + h * head_bytes_ + is_value * value_offset();
                    auto* items = reinterpret_cast<typename I::type*>(tile);
                    for (int64_t t = 0; t < kTokens; ++t)
                        for (int64_t d = 0; d < shape_.head_dim; ++d)
                            items[is_value ? I::index(t, d, padded_dim_) : I::index(d, t, kTokens)] = I::pack(*in++);
                }
    });
}

}  // namespace octavo
