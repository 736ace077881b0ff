#include "program.h"

namespace octavo {

namespace {
In read_only(Out x) { return {x.data, x.rows, x.cols, x.stride}; }
}  // namespace

void Program::add_chunk(const void* data, int64_t bytes) { chunks_[reinterpret_cast<uintptr_t>(data)] = bytes; }

// The array, or the columns of one, that earlier operations wrote.
Program::Operand Program::written(In x) const {
    const auto address = reinterpret_cast<uintptr_t>(x.data);
    auto found = arrays_.upper_bound(address);
    require(found != arrays_.begin(), "an operand was not written by an operation of the step");
    const Operand& array = (--found)->second;
    const int64_t first = x.data - array.data;
    require(first + x.cols <= array.stride && (x.rows < 2 || x.stride == array.stride),
            "an operand is neither an array of the step nor some of its columns");
    require(x.rows == rows(array.count, batch_), "an operand has not all rows of its array");
    return {array.data + first, x.cols, array.stride, array.count};
}

Program::Operand Program::output(Out out, Count count) {
    const auto address = reinterpret_cast<uintptr_t>(out.data);
    const int64_t bytes = checked_product(checked_product(capacity_rows_, out.cols, "an arena array"), sizeof(float), "an arena array");
    auto chunk = chunks_.upper_bound(address);
    require(chunk != chunks_.begin(), "a result lies outside the arena");
    --chunk;
    require(int64_t(address - chunk->first) + bytes <= chunk->second, "a result lies outside the arena");
    require(out.stride == out.cols, "a result is not a whole array of the arena");
    require(out.rows == rows(count, batch_), "a result has not the rows of the batch");
    // What lay there before is gone.
    auto old = arrays_.lower_bound(address);
    if (old != arrays_.begin()) {
        const auto before = std::prev(old);
        if (before->first + uintptr_t(before->second.stride * capacity_rows_) * sizeof(float) > address) old = before;
    }
    while (old != arrays_.end() && old->first < address + uintptr_t(bytes)) old = arrays_.erase(old);
    const Operand operand{out.data, out.cols, out.cols, count};
    arrays_.emplace(address, operand);
    return operand;
}

Program::BatchVector Program::recognise(Vector<const int32_t> array, const char* name) const {
    for (BatchVector member : {&BatchInputs::token_ids, &BatchInputs::positions, &BatchInputs::query_start_loc, &BatchInputs::logits_rows})
        if ((batch_.*member).data == array.data && (batch_.*member).size == array.size) return member;
    throw std::invalid_argument(std::string(name) + " is not an array of the batch");
}

size_t Program::group_of(Vector<const int64_t> slots) const {
    for (size_t i = 0; i < batch_.slots.size(); ++i)
        if (batch_.slots[i].data == slots.data && batch_.slots[i].size == slots.size) return i;
    throw std::invalid_argument("slot_mapping is not an array of the batch");
}

size_t Program::group_of(Matrix<const int32_t> table) const {
    for (size_t i = 0; i < batch_.block_tables.size(); ++i)
        if (batch_.block_tables[i].data == table.data && batch_.block_tables[i].rows == table.rows) return i;
    throw std::invalid_argument("block_table is not an array of the batch");
}

// run: the operation by itself; make: its rows, for a linear that comes next.
void Program::append_rows(Operand out, MakeRows make, Op run) {
    ops_.push_back(std::move(run));
    last_rows_ = {ops_.size(), out.data, std::move(make)};
}

void Program::embedding(Vector<const int32_t> ids, const PackedWeight& weight, Out out) {
    require(recognise(ids, "token_ids") == &BatchInputs::token_ids, "embedding: only the token ids of the batch can be replayed");
    const Operand to = output(out, Count::Tokens);
    ops_.push_back([=, &weight](Context& c, const BatchInputs& b) { c.embedding(b.token_ids, weight, to.of(b)); });
}

void Program::linear(In x, const PackedWeight& weight, int64_t num_generated, Out out) {
    const Operand from = written(x);
    require(num_generated == from.generated(batch_), "num_generated is not that of the batch");
    const Operand to = output(out, from);
    if (last_rows_.op == ops_.size() && last_rows_.out == from.data && from.cols == from.stride) {
        ops_.pop_back();
        ++fused_;
        ops_.push_back([=, &weight, make = std::move(last_rows_.make)](Context& c, const BatchInputs& b) {
            c.linear(read_only(from.of(b)), weight, from.generated(b), to.of(b), make(c, b));
        });
        return;
    }
    ops_.push_back([=, &weight](Context& c, const BatchInputs& b) { c.linear(read_only(from.of(b)), weight, from.generated(b), to.of(b)); });
}

void Program::rms_norm(In x, Vector<const float> weight, float eps, Out out) {
    const Operand from = written(x), to = output(out, from);
    append_rows(to, [=](const Context& c, const BatchInputs& b) { return c.rms_norm_rows(read_only(from.of(b)), weight, eps, to.of(b)); },
                [=](Context& c, const BatchInputs& b) { c.rms_norm(read_only(from.of(b)), weight, eps, to.of(b)); });
}

void Program::add_rms_norm(Out x, In y, Vector<const float> weight, float eps, Out out) {
    const Operand sum = written(read_only(x)), from = written(y), to = output(out, sum);
    require(sum.count == from.count, "add_rms_norm: the operands have different rows");
    append_rows(to, [=](const Context& c, const BatchInputs& b) { return c.add_rms_norm_rows(sum.of(b), read_only(from.of(b)), weight, eps, to.of(b)); },
                [=](Context& c, const BatchInputs& b) { c.add_rms_norm(sum.of(b), read_only(from.of(b)), weight, eps, to.of(b)); });
}

void Program::add(Out x, In y) {
    const Operand sum = written(read_only(x)), from = written(y);
    require(sum.count == from.count, "add: the operands have different rows");
    ops_.push_back([=](Context& c, const BatchInputs& b) { c.add(sum.of(b), read_only(from.of(b))); });
}

void Program::silu_mul(In gate_up, Out out) {
    const Operand from = written(gate_up), to = output(out, from);
    append_rows(to, [=](const Context& c, const BatchInputs& b) { return c.silu_mul_rows(read_only(from.of(b)), to.of(b)); },
                [=](Context& c, const BatchInputs& b) { c.silu_mul(read_only(from.of(b)), to.of(b)); });
}

void Program::take_rows(In x, Vector<const int32_t> rows, Out out) {
    require(recognise(rows, "rows") == &BatchInputs::logits_rows, "take_rows: only the logits_rows of the batch can be replayed");
    const Operand from = written(x), to = output(out, Count::Logits);
    ops_.push_back([=](Context& c, const BatchInputs& b) { c.take_rows(read_only(from.of(b)), b.logits_rows, to.of(b)); });
}

void Program::rope_kv_write(In qkv, const RopeTable& rope, KvPool& kv, int64_t layer, Vector<const int32_t> positions,
                            Vector<const int64_t> slots, int64_t num_heads, Out q) {
    const BatchVector where = recognise(positions, "positions");
    const size_t group = group_of(slots);
    const Operand from = written(qkv), to = output(q, from);
    ops_.push_back([=, &rope, &kv](Context& c, const BatchInputs& b) {
        c.rope_kv_write(read_only(from.of(b)), rope, kv, layer, b.*where, b.slots[group], num_heads, to.of(b));
    });
}

void Program::attend(In q, const KvPool& kv, int64_t layer, const AttendBatch& batch, const AttendOptions& options, Out out) {
    const BatchVector positions = recognise(batch.positions, "positions"), starts = recognise(batch.query_start_loc, "query_start_loc");
    const size_t group = group_of(batch.block_table);
    const Operand from = written(q), to = output(out, from);
    ops_.push_back([=, &kv](Context& c, const BatchInputs& b) {
        c.attend(read_only(from.of(b)), kv, layer, {b.*positions, b.*starts, b.block_tables[group]}, options, to.of(b));
    });
}

void Program::replay(Context& context, const BatchInputs& batch, const std::function<void()>& between_ops) const {
    require(batch.token_ids.size <= capacity_rows_ && batch.logits_rows.size <= capacity_rows_, "replay: the batch has more rows than were recorded for");
    require(batch.slots.size() == batch_.slots.size() && batch.block_tables.size() == batch_.block_tables.size(),
            "replay: the batch has another number of KV groups");
    const ThreadPool::Busy busy = context.keep_spinning();
    for (const auto& op : ops_) {
        op(context, batch);
        between_ops();
    }
}

}  // namespace octavo
