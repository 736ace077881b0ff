// Operations that treat each row by itself.
#include <algorithm>
#include <cstring>

#include "context.h"

namespace octavo {

Context::Context(int threads, const std::string& isa) : kernels_(kernels_for(isa)), pool_(threads) {}

uint8_t* Context::scratch(int64_t bytes) {
    if (scratch_.size() < bytes) {
        scratch_ = Memory();
        scratch_ = Memory(bytes + bytes / 2, "scratch");
    }
    return scratch_.data();
}

namespace {
void add_row(float* x, const float* y, int64_t cols) {
    for (int64_t i = 0; i < cols; ++i) x[i] += y[i];
}
}  // namespace

RowTask Context::rms_norm_rows(In x, Vector<const float> weight, float eps, Out out) const {
    require(out.rows == x.rows && out.cols == x.cols, "rms_norm: out must have the shape of x");
    require(weight.size == x.cols && x.cols > 0, "rms_norm: weight must have one value per column");
    return [this, x, weight, eps, out](int64_t a, int64_t b) {
        kernels_.rms_norm(x.data + a * x.stride, x.stride, b - a, x.cols, weight.data, eps, out.data + a * out.stride, out.stride);
    };
}

// A row at a time, so that the norm finds the sum in cache; the bits are those of the two operations.
RowTask Context::add_rms_norm_rows(Out x, In y, Vector<const float> weight, float eps, Out out) const {
    require(x.rows == y.rows && x.cols == y.cols, "add_rms_norm: x and y must have the same shape");
    require(out.rows == x.rows && out.cols == x.cols, "add_rms_norm: out must have the shape of x");
    require(weight.size == x.cols && x.cols > 0, "add_rms_norm: weight must have one value per column");
    return [this, x, y, weight, eps, out](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; ++t) {
            float* sum = x.data + t * x.stride;
            add_row(sum, y.data + t * y.stride, x.cols);
            kernels_.rms_norm(sum, x.stride, 1, x.cols, weight.data, eps, out.data + t * out.stride, out.stride);
        }
    };
}

RowTask Context::silu_mul_rows(In gate_up, Out out) const {
    require(out.rows == gate_up.rows && gate_up.cols == 2 * out.cols, "silu_mul: gate_up must have twice the columns of out");
    return [this, gate_up, out](int64_t a, int64_t b) {
        kernels_.silu_mul(gate_up.data + a * gate_up.stride, gate_up.stride, b - a, out.cols, out.data + a * out.stride, out.stride);
    };
}

void Context::rms_norm(In x, Vector<const float> weight, float eps, Out out) {
    const RowTask rows = rms_norm_rows(x, weight, eps, out);
    const std::lock_guard lock(mutex_);
    each_rows(x.rows, 4 * x.cols, rows);
}

void Context::add_rms_norm(Out x, In y, Vector<const float> weight, float eps, Out out) {
    const RowTask rows = add_rms_norm_rows(x, y, weight, eps, out);
    const std::lock_guard lock(mutex_);
    each_rows(x.rows, 4 * x.cols, rows);
}

void Context::add(Out x, In y) {
    require(x.rows == y.rows && x.cols == y.cols, "add_: both arrays must have the same shape");
    const std::lock_guard lock(mutex_);
    each_rows(x.rows, 4 * x.cols, [&](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; ++t) add_row(x.data + t * x.stride, y.data + t * y.stride, x.cols);
    });
}

void Context::silu_mul(In gate_up, Out out) {
    const RowTask rows = silu_mul_rows(gate_up, out);
    const std::lock_guard lock(mutex_);
    each_rows(out.rows, 4 * out.cols, rows);
}

void Context::take_rows(In x, Vector<const int32_t> rows, Out out) {
    require(out.rows == rows.size && out.cols == x.cols, "take_rows: out must be [rows, columns of x]");
    for (int64_t i = 0; i < rows.size; ++i)
        if (rows.data[i] < 0 || rows.data[i] >= x.rows) throw std::out_of_range("take_rows: row " + std::to_string(rows.data[i]) + " is outside x");
    const std::lock_guard lock(mutex_);
    for (int64_t i = 0; i < rows.size; ++i)
        std::copy_n(x.data + rows.data[i] * x.stride, x.cols, out.data + i * out.stride);
}

void Context::copy_blocks(KvPool& kv, Vector<const int64_t> sources, Vector<const int64_t> targets) {
    require(sources.size == targets.size, "copy_blocks: as many targets as sources are needed");
    std::vector<int64_t> from(sources.data, sources.data + sources.size), to(targets.data, targets.data + targets.size);
    std::sort(from.begin(), from.end());
    std::sort(to.begin(), to.end());
    for (const auto* blocks : {&from, &to})
        if (!blocks->empty() && (blocks->front() < 0 || blocks->back() >= kv.shape().blocks))
            throw std::out_of_range("copy_blocks: a block is outside the pool");
    require(std::adjacent_find(to.begin(), to.end()) == to.end(), "copy_blocks: a target appears twice");
    for (int64_t block : to) require(!std::binary_search(from.begin(), from.end(), block), "copy_blocks: a target is among the sources");
    const std::lock_guard lock(mutex_);
    pool_.run(sources.size, [&](int64_t i) { kv.copy_block(sources.data[i], targets.data[i]); });
}

}  // namespace octavo
