// A recorded step: the operations of one forward pass, replayed by one call for any number of rows.
//
// An operand is an array of the step's arena, whose address does not depend on row counts (octavo/ops/arena.py), so what is
// recorded of it is its address, its columns, and which of two counts its rows are: all rows of the batch, or those whose
// logits are wanted. The arrays of the batch are operands of the replay. Operations run through Context's own methods,
// with the same checks and the same bits as when they are called one by one. A norm or a gated activation that a linear reads
// right after is run by it, row by row before they are quantised: one job of the threads less.
//
// Owner: the Python object StepReplayer (octavo/ops/cpu/replay.py), which also keeps weights, pools and arena alive. Not
// here: when a recording no longer holds. No Python in here: bind_program.cpp converts.
#pragma once
#include <functional>
#include <map>
#include <vector>

#include "context.h"

namespace octavo {

// What operations read of a ForwardBatch (octavo/ops/api.py).
struct BatchInputs {
    Vector<const int32_t> token_ids, positions, query_start_loc, logits_rows;
    std::vector<Vector<const int64_t>> slots;           // of each KV group
    std::vector<Matrix<const int32_t>> block_tables;    // of each KV group
    int64_t num_generated, num_generated_logits;        // rows of kind GENERATED among all rows, and among logits_rows
};

class Program {
public:
    // capacity_rows: room of every arena array. batch: the one recorded with, by which operations' arguments are recognised.
    Program(int64_t capacity_rows, BatchInputs batch) : capacity_rows_(capacity_rows), batch_(std::move(batch)) {}

    // Memory that operands may lie in.
    void add_chunk(const void* data, int64_t bytes);

    // Each appends the operation of that name with the arguments it was just called with; `out` is a whole array of the
    // arena. std::invalid_argument for what cannot be replayed. A new operation is one more method of this kind.
    void embedding(Vector<const int32_t> ids, const PackedWeight& weight, Out out);
    void linear(In x, const PackedWeight& weight, int64_t num_generated, Out out);
    void rms_norm(In x, Vector<const float> weight, float eps, Out out);
    void add_rms_norm(Out x, In y, Vector<const float> weight, float eps, Out out);
    void add(Out x, In y);
    void silu_mul(In gate_up, Out out);
    void take_rows(In x, Vector<const int32_t> rows, Out out);
    void rope_kv_write(In qkv, const RopeTable& rope, KvPool& kv, int64_t layer, Vector<const int32_t> positions,
                       Vector<const int64_t> slots, int64_t num_heads, Out q);
    void attend(In q, const KvPool& kv, int64_t layer, const AttendBatch& batch, const AttendOptions& options, Out out);

    // Runs all operations; between_ops is called after each. Throws what the operations throw, and
    // std::invalid_argument for a batch beyond the capacity.
    void replay(Context& context, const BatchInputs& batch, const std::function<void()>& between_ops) const;

    int64_t size() const { return int64_t(ops_.size()); }
    // Norms and gated activations that are part of the linear after them.
    int64_t fused() const { return fused_; }

private:
    enum class Count { Tokens, Logits };
    static int64_t rows(Count count, const BatchInputs& b) { return count == Count::Tokens ? b.token_ids.size : b.logits_rows.size; }
    struct Operand {
        float* data;
        int64_t cols, stride;
        Count count;
        Out of(const BatchInputs& b) const { return {data, rows(count, b), cols, stride}; }
        int64_t generated(const BatchInputs& b) const { return count == Count::Tokens ? b.num_generated : b.num_generated_logits; }
        operator Count() const { return count; }
    };
    using Op = std::function<void(Context&, const BatchInputs&)>;
    using MakeRows = std::function<RowTask(const Context&, const BatchInputs&)>;
    using BatchVector = Vector<const int32_t> BatchInputs::*;

    void append_rows(Operand out, MakeRows make, Op run);
    Operand written(In x) const;
    Operand output(Out out, Count count);
    BatchVector recognise(Vector<const int32_t> array, const char* name) const;
    size_t group_of(Vector<const int64_t> slots) const;
    size_t group_of(Matrix<const int32_t> block_table) const;

    int64_t capacity_rows_;
    BatchInputs batch_;
    std::map<uintptr_t, int64_t> chunks_;    // first byte -> bytes
    std::map<uintptr_t, Operand> arrays_;    // first byte -> what operations wrote there last
    std::vector<Op> ops_;
    // The last norm or gated activation: which operation it is, counted from 1, and what it writes.
    struct {
        size_t op = 0;
        const float* out = nullptr;
        MakeRows make;
    } last_rows_;
    int64_t fused_ = 0;
};

}  // namespace octavo
