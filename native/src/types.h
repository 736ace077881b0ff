// Plain data shared by the kernels of every instruction-set level and the code that calls them.
//
// Owner: nobody; these are views and constants. No inline functions and no library headers beyond fixed-width
// integers: whatever is inline here would be compiled once per level, and the linker would keep one copy of it,
// possibly the one with instructions this machine lacks.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Output columns of a weight panel. A 512-bit register holds one float of each column.
constexpr int64_t kPanel = 16;
// Inputs that share one activation scale, and one weight scale (two for Q8B16).
constexpr int64_t kBlock = 32;
// Tokens of a KV block.
constexpr int64_t kTokens = 16;
// Keys of one attention split: softmax runs over a split at a time, splits are merged in order.
constexpr int64_t kSplit = 256;
// Most query vectors one attention tile works on.
constexpr int64_t kTileQueries = 16;
constexpr int64_t kMaxHeadDim = 256;
// Most rows of one call of PromptKernels::linear. A multiple of kTileRows.
constexpr int64_t kPromptRows = 256;
// Rows of an activation tile: [16 rows][32 inputs] bfloat16, 1 KB.
constexpr int64_t kTileRows = 16;

enum class Layout : int32_t { F32, F16, BF16, Q4B32, Q8B32, Q8B16 };
// I8: integers with one scale per token, KV head, and K or V (kv_pool.h).
enum class KvType : int32_t { F32, BF16, F16, I8 };

// How finely activations are rounded (docs/numerics.md says which rows and weights get which).
//   Wide   15-bit integers, |q| <= 127 * 128: what two planes of bytes hold, 128 * high + low, for the levels whose
//          products are of bytes.
//   Bytes  |q| <= 127.
enum class Rounding : int32_t { Wide, Bytes };

// 32 quantised activations: x[i] ~ scale * q[i].
struct alignas(32) ActBlock {
    int16_t q[32];               // in the form and order that the level's own products read: store_activations of its header
    float scale;
    float offset_factor;         // scale * sum: what a weight offset of the block is multiplied by
    float half_offset_factor[2]; // the same of each half of 16
    int32_t sum;                 // sum of q
    int32_t half_sum[2];
    int32_t unused;
};

// The panels of one part of a weight; see packing.h for the layout of the bytes.
struct Segment {
    Layout layout;
    int64_t columns;     // valid output columns; the last panel may be partly padding
    int64_t panels;
    int64_t k;           // inputs, padded to a multiple of kBlock for quantised layouts
    int64_t panel_bytes;
    int64_t block_bytes; // quantised layouts: bytes of one block of a panel
    const uint8_t* data;
    int32_t zero;
    bool scale_f16;      // scales (and offsets) are stored as IEEE halves, else as floats
    bool has_offset;
};

// Attention of one layer over one pool.
struct AttendJob {
    const uint8_t* layer;   // first byte of the layer in the pool
    int64_t block_bytes;    // of one block in one layer
    int64_t head_bytes;     // of one KV head in it: the K tile, then the V tile at value_offset
    int64_t value_offset;
    int64_t scale_offset;   // I8: of the scales, those of 16 keys, then those of 16 values, bfloat16
    KvType type;
    int64_t head_dim;
    int64_t padded_dim;     // head_dim rounded up to a multiple of 16: row length of V tiles
    int64_t group;          // query heads per KV head
    const float* q;         // [rows, heads * head_dim]
    int64_t q_stride;
    float* out;             // [rows, heads * head_dim]
    int64_t out_stride;
    const int32_t* positions;
    float scale;
    float softcap;          // 0: none
    int64_t window;         // keys a row sees, itself included; INT64_MAX: all
};

// Query vectors [first, last) of one segment that read one KV head. Query i is row i / group, head i % group of the
// KV head's group.
struct AttendTile {
    int64_t row;            // first row of the segment
    int64_t first, last;
    int64_t kv_head;
    const int32_t* table;   // the segment's block table
};

// Columns of logits whose maximum and sum of weights are kept; sums of blocks are added in float64, in order.
constexpr int64_t kLogitsBlock = 256;

// Passes over a row of n logits, or over a part that begins with a whole block. One value a block is written.
struct SamplingKernels {
    // Maxima, NaN apart. Returns whether there was a NaN.
    bool (*max_blocks)(const float* x, int64_t n, float* maxima);
    // Sums of exp((x - max) / temperature), and of the same times its exponent.
    void (*exp_blocks)(const float* x, int64_t n, float max, float temperature, float* sums);
    void (*moment_blocks)(const float* x, int64_t n, float max, float temperature, float* sums);
    // weights[i] = exp(z[i]).
    void (*exp_list)(const float* z, int64_t n, float* weights);
    // Writes first + i for every x[i] >= limit in order; returns how many. Blocks whose maximum is smaller are skipped.
    int64_t (*collect)(const float* x, int64_t n, const float* maxima, float limit, uint32_t first, uint32_t* out);
    int64_t (*count_at_least)(const float* x, int64_t n, float limit);
};

// Rows of kind PROMPT times quantised and bfloat16 weights, both operands rounded to bfloat16 (docs/numerics.md). All
// nullptr where a level has no units for it; a level that has them uses them for every such row, however few there are.
struct PromptKernels {
    // Whether a small product comes out exactly right. Called before the level is offered.
    bool (*self_test)();
    // x [rows, k] -> rows [first, first + rows) of tiles [row tiles][ceil(k / 32)][16][32]; the tail of the last input block is zero.
    void (*round_rows)(const float* x, int64_t stride, int64_t first, int64_t rows, int64_t k, uint16_t* tiles);
    // Panels [panel0, panel1) of a segment times the first `rows` <= kPromptRows rows of `tiles`, whose last tile is filled up with
    // rows of any finite numbers. out: column 0 of the segment.
    void (*linear)(const Segment* segment, const uint16_t* tiles, int64_t rows, int64_t panel0, int64_t panel1,
                   const float* bias, float* out, int64_t out_stride);
};

// What one level offers. Functions never throw, never allocate and trust their arguments; callers check.
struct Kernels {
    const char* name;

    // x [rows, k] -> blocks [rows, ceil(k / 32)]; the tail of the last block is zero.
    void (*quantize_rows)(const float* x, int64_t stride, int64_t rows, int64_t k, Rounding rounding, ActBlock* out);
    // Panels [panel0, panel1) of a quantised segment times `rows` rows, quantised with the given rounding (Bytes: 4-bit
    // weights only). out: column 0 of the segment.
    void (*linear_quantized)(const Segment* segment, const ActBlock* x, int64_t blocks_per_row, int64_t rows, Rounding rounding,
                             int64_t panel0, int64_t panel1, const float* bias, float* out, int64_t out_stride);
    // The same for float layouts, on float rows.
    void (*linear_float)(const Segment* segment, const float* x, int64_t stride, int64_t rows,
                         int64_t panel0, int64_t panel1, const float* bias, float* out, int64_t out_stride);

    void (*rms_norm)(const float* x, int64_t stride, int64_t rows, int64_t n, const float* weight, float eps,
                     float* out, int64_t out_stride);
    void (*silu_mul)(const float* gate_up, int64_t stride, int64_t rows, int64_t n, float* out, int64_t out_stride);

    // state: per query padded_dim + kPanel floats (see kernels/attention.inl.h). attend_splits starts from an empty
    // state and folds in the splits [split0, split1); attend_merge folds a later state into an earlier one;
    // attend_finish divides and writes the output rows.
    void (*attend_splits)(const AttendJob* job, const AttendTile* tile, int64_t split0, int64_t split1, float* state);
    void (*attend_merge)(const AttendJob* job, int64_t queries, float* state, const float* later);
    void (*attend_finish)(const AttendJob* job, const AttendTile* tile, const float* state);

    SamplingKernels sampling;
    PromptKernels prompt;
};

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512VnniKernels;
extern const PromptKernels kAmxPromptKernels;  // all that level "amx" adds to "avx512vnni"

}  // namespace octavo
