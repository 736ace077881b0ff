// The KV pool of one group: layer -> block -> KV head -> a K tile and a V tile of 16 tokens.
//
//   two-byte types   K [D / 2][16 tokens][2], V [8 token pairs][Dp][2]: a 32-bit lane is a token (K) or a dimension (V)
//                    and holds two neighbouring rows, which a shift and a mask turn into two floats
//   float            K [D][16 tokens], V [16 tokens][Dp]
//   int8             the same in bytes; after both tiles the scales, bfloat16: [16 tokens] of K, [16 tokens] of V
//
// Dp is D rounded up to a multiple of 16; the padding stays zero. Memory is reserved on construction and touched when
// written. Nothing outside this file and kernels/attention.inl.h indexes it.
#pragma once
#include "memory.h"
#include "types.h"

namespace octavo {

struct KvShape {
    int64_t layers, blocks, kv_heads, head_dim;
    KvType type;
};

class KvPool {
public:
    explicit KvPool(const KvShape& shape);

    // Bytes of one block over all layers; std::invalid_argument for shapes the kernels do not take.
    static int64_t bytes_per_block(const KvShape& shape);

    const KvShape& shape() const { return shape_; }
    int64_t padded_dim() const { return padded_dim_; }
    int64_t head_bytes() const { return head_bytes_; }
    int64_t value_offset() const { return tile_bytes_; }
    int64_t scale_offset() const { return 2 * tile_bytes_; }
    int64_t block_bytes() const { return head_bytes_ * shape_.kv_heads; }  // in one layer
    int64_t slots() const { return shape_.blocks * kTokens; }
    int64_t bytes() const { return memory_.size(); }
    uint8_t* layer(int64_t index) const { return memory_.data() + index * shape_.blocks * block_bytes(); }

    // k and v: head_dim floats each, rounded to the pool's type (int8: quantize.h).
    void write(int64_t layer, int64_t slot, int64_t kv_head, const float* k, const float* v);
    void copy_block(int64_t source, int64_t target);
    // values: [layers, 2, kv_heads, 16, head_dim].
    void export_block(int64_t block, float* values) const;
    void import_block(int64_t block, const float* values);

private:
    template <typename I, typename T, typename F> void each_tile(int64_t block, T* values, const F& f) const;

    KvShape shape_;
    int64_t padded_dim_, tile_bytes_, head_bytes_;
    Memory memory_;
};

}  // namespace octavo
