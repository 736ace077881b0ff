// One set of native operations: the kernels of a level, a thread pool, and scratch memory. Methods check every size,
// stride and index they are given (std::invalid_argument, std::out_of_range) before they touch memory, then compute.
//
// Owner: the Python object CpuOps. A mutex lets one operation run at a time; results never depend on how many threads
// share it. No Python in here: module.cpp converts.
#pragma once
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "fork_guard.h"
#include "kv_pool.h"
#include "machine.h"
#include "memory.h"
#include "packing.h"
#include "thread_pool.h"
#include "types.h"

namespace octavo {

// Rows of `cols` neighbouring items, `stride` items apart.
template <typename T> struct Matrix {
    T* data;
    int64_t rows, cols, stride;
};
template <typename T> struct Vector {
    T* data;
    int64_t size;
};
using In = Matrix<const float>;
using Out = Matrix<float>;

// cos and sin of every position, [max_position, half] each.
struct RopeTable {
    int64_t max_position, half;
    std::vector<float> cos, sin;
};

// The parts of a ForwardBatch that attention reads.
struct AttendBatch {
    Vector<const int32_t> positions;        // [T]
    Vector<const int32_t> query_start_loc;  // [S + 1]
    Matrix<const int32_t> block_table;      // [S, max blocks]
};

struct AttendOptions {
    float scale;
    int64_t window;  // 0: all keys
    float softcap;   // 0: none
};

struct SampleRow;    // sampling.h
struct LogprobsOut;
// Splits of one tile, computed together. state: where in scratch memory their state goes; -1: the tile is whole.
struct AttendItem {
    size_t tile;
    int64_t first_split, last_split, state;
};

// Computes rows [first, last) of an operation that treats each row by itself. Its arguments have been checked.
using RowTask = std::function<void(int64_t first, int64_t last)>;

class Context {
public:
    Context(int threads, const std::string& isa);

    const char* isa() const { return kernels_.name; }
    int threads() const { return pool_.threads(); }

    void pack_part(PackedWeight& weight, const PartSource& part);

    // Rows [0, num_generated) of x are of kind GENERATED (docs/numerics.md).
    // before: makes the rows of x, each by the thread that is about to quantise it.
    void linear(In x, const PackedWeight& weight, int64_t num_generated, Out out, const RowTask& before = {});
    void embedding(Vector<const int32_t> ids, const PackedWeight& weight, Out out);

    void rms_norm(In x, Vector<const float> weight, float eps, Out out);
    void add_rms_norm(Out x, In y, Vector<const float> weight, float eps, Out out);  // x += y, then rms_norm
    void add(Out x, In y);
    void silu_mul(In gate_up, Out out);
    // The same operations, checked but not yet run: for linear's `before`.
    RowTask rms_norm_rows(In x, Vector<const float> weight, float eps, Out out) const;
    RowTask add_rms_norm_rows(Out x, In y, Vector<const float> weight, float eps, Out out) const;
    RowTask silu_mul_rows(In gate_up, Out out) const;
    void take_rows(In x, Vector<const int32_t> rows, Out out);

    void rope_kv_write(In qkv, const RopeTable& rope, KvPool& kv, int64_t layer, Vector<const int32_t> positions,
                       Vector<const int64_t> slots, int64_t num_heads, Out q);
    void attend(In q, const KvPool& kv, int64_t layer, const AttendBatch& batch, const AttendOptions& options, Out out);

    void copy_blocks(KvPool& kv, Vector<const int64_t> sources, Vector<const int64_t> targets);

    // While it lives, the workers do not park: a sequence of operations follows.
    ThreadPool::Busy keep_spinning() { return ThreadPool::Busy(pool_); }
    void sample(In logits, const std::vector<SampleRow>& rows, Vector<int32_t> tokens, const LogprobsOut& logprobs);

private:
    uint8_t* scratch(int64_t bytes);
    template <typename F> void each_rows(int64_t rows, int64_t cols, const F& function);
    struct Rounded {
        const ActBlock* bytes = nullptr;  // [generated rows, blocks]
        const ActBlock* wide = nullptr;   // [rows, or generated rows where the others are in tiles; blocks]
        const uint16_t* tiles = nullptr;  // [tiles of prompt rows, blocks, 16, 32]
        int64_t blocks = 0;
    };
    Rounded round(In x, const PackedWeight& weight, int64_t generated, const RowTask& before);
    bool in_tiles(Layout layout) const { return kernels_.prompt.linear && (is_quantized(layout) || layout == Layout::BF16); }
    void linear_rows(In x, const PackedWeight& weight, int64_t generated, Out out, const RowTask& before);
    void attend_tiles(const AttendJob& job);

    std::mutex mutex_;
    const Kernels& kernels_;
    ThreadPool pool_;
    ForkGuard fork_guard_{mutex_, pool_};
    Memory scratch_;
    std::vector<AttendTile> tiles_;
    std::vector<AttendItem> items_, divided_;
};

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// Calls function(first, last) over chunks of rows, on all threads when there is enough to do.
template <typename F> void Context::each_rows(int64_t rows, int64_t cols, const F& function) {
    constexpr int64_t kItemsPerChunk = 8192;
    const int64_t chunk = cols >= kItemsPerChunk ? 1 : (kItemsPerChunk + cols - 1) / (cols > 0 ? cols : 1);
    const int64_t chunks = (rows + chunk - 1) / chunk;
    pool_.run(chunks, [&](int64_t i) {
        const int64_t last = (i + 1) * chunk;
        function(i * chunk, last < rows ? last : rows);
    });
}

}  // namespace octavo
