// The Python module octavo._native: CPU facts, handles, and the operations of a Context on NumPy arrays.
// Arguments are checked with the GIL held; the GIL is released while an operation computes. Errors are ValueError,
// IndexError, TypeError and MemoryError. Called by octavo/ops/cpu only.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "bindings.h"

namespace octavo {

namespace {

using In2 = Array2<const float>;
using Out2 = Array2<float>;
using Ints = Array1<const int32_t>;
using Longs = Array1<const int64_t>;

void linear(Context& context, const In2& x, const PackedWeight& weight, int64_t num_generated, const Out2& out) {
    const In from = matrix(x, "x");
    const Out to = matrix(out, "out");
    const nb::gil_scoped_release nogil;
    context.linear(from, weight, num_generated, to);
}

void embedding(Context& context, const Ints& ids, const PackedWeight& weight, const Out2& out) {
    const auto from = vector(ids, "token_ids");
    const Out to = matrix(out, "out");
    const nb::gil_scoped_release nogil;
    context.embedding(from, weight, to);
}

void rms_norm(Context& context, const In2& x, const Array1<const float>& weight, float eps, const Out2& out) {
    const In from = matrix(x, "x");
    const auto w = vector(weight, "weight");
    const Out to = matrix(out, "out");
    const nb::gil_scoped_release nogil;
    context.rms_norm(from, w, eps, to);
}

void add_rms_norm(Context& context, const Out2& x, const In2& y, const Array1<const float>& weight, float eps, const Out2& out) {
    const Out sum = matrix(x, "x");
    const In from = matrix(y, "y");
    const auto w = vector(weight, "weight");
    const Out to = matrix(out, "out");
    const nb::gil_scoped_release nogil;
    context.add_rms_norm(sum, from, w, eps, to);
}

void add(Context& context, const Out2& x, const In2& y) {
    const Out to = matrix(x, "x");
    const In from = matrix(y, "y");
    const nb::gil_scoped_release nogil;
    context.add(to, from);
}

void silu_mul(Context& context, const In2& gate_up, const Out2& out) {
    const In from = matrix(gate_up, "gate_up");
    const Out to = matrix(out, "out");
    const nb::gil_scoped_release nogil;
    context.silu_mul(from, to);
}

void take_rows(Context& context, const In2& x, const Ints& rows, const Out2& out) {
    const In from = matrix(x, "x");
    const auto which = vector(rows, "rows");
    const Out to = matrix(out, "out");
    const nb::gil_scoped_release nogil;
    context.take_rows(from, which, to);
}

void rope_kv_write(Context& context, const In2& qkv, const RopeTable& rope, KvPool& kv, int64_t layer, const Ints& positions,
                   const Longs& slots, int64_t num_heads, const Array3<float>& q) {
    const In from = matrix(qkv, "qkv");
    const auto where = vector(positions, "positions");
    const auto to_slots = vector(slots, "slot_mapping");
    const Out to = flat_matrix(q, "q");
    const nb::gil_scoped_release nogil;
    context.rope_kv_write(from, rope, kv, layer, where, to_slots, num_heads, to);
}

void attend(Context& context, const Array3<const float>& q, const KvPool& kv, int64_t layer, const Ints& positions, const Ints& query_start_loc,
            const Array2<const int32_t>& block_table, float scale, int64_t window, float softcap, const Out2& out) {
    const In from = flat_matrix(q, "q");
    if (int64_t(q.shape(2)) != kv.shape().head_dim) refuse("q", "must be [T, H, head_dim of the KV pool]");
    const AttendBatch batch{vector(positions, "positions"), vector(query_start_loc, "query_start_loc"), matrix(block_table, "block_table")};
    const Out to = matrix(out, "out");
    const nb::gil_scoped_release nogil;
    context.attend(from, kv, layer, batch, {scale, window, softcap}, to);
}

void copy_blocks(Context& context, KvPool& kv, const Longs& sources, const Longs& targets) {
    const auto from = vector(sources, "sources"), to = vector(targets, "targets");
    const nb::gil_scoped_release nogil;
    context.copy_blocks(kv, from, to);
}

void bind_context(nb::module_& m) {
    nb::class_<Context> context(m, "Context", "Kernels of one instruction-set level with a pool of `threads` threads, the caller's included.");
    context.def("__init__", [](Context* self, int threads, const std::string& isa) {
        if (threads < 1 || threads > 1024) refuse("threads", "must be between 1 and 1024");
        new (self) Context(threads, isa);
    }, nb::arg("threads"), nb::arg("isa") = "");
    context.def_prop_ro("isa", [](const Context& c) { return std::string(c.isa()); });
    context.def_prop_ro("threads", &Context::threads);
    bind_packing(context);
    bind_program(m, context);
    context.def("linear", &linear, nb::arg("x").noconvert(), nb::arg("weight"), nb::arg("num_generated"), nb::arg("out").noconvert());
    bind_sampling(context);
    context.def("embedding", &embedding, nb::arg("token_ids").noconvert(), nb::arg("weight"), nb::arg("out").noconvert());
    context.def("rms_norm", &rms_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"), nb::arg("out").noconvert());
    context.def("add_rms_norm", &add_rms_norm, nb::arg("x").noconvert(), nb::arg("y").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
                nb::arg("out").noconvert());
    context.def("add", &add, nb::arg("x").noconvert(), nb::arg("y").noconvert());
    context.def("silu_mul", &silu_mul, nb::arg("gate_up").noconvert(), nb::arg("out").noconvert());
    context.def("take_rows", &take_rows, nb::arg("x").noconvert(), nb::arg("rows").noconvert(), nb::arg("out").noconvert());
    context.def("rope_kv_write", &rope_kv_write, nb::arg("qkv").noconvert(), nb::arg("rope"), nb::arg("kv"), nb::arg("layer"),
                nb::arg("positions").noconvert(), nb::arg("slots").noconvert(), nb::arg("num_heads"), nb::arg("q").noconvert());
    context.def("attend", &attend, nb::arg("q").noconvert(), nb::arg("kv"), nb::arg("layer"), nb::arg("positions").noconvert(),
                nb::arg("query_start_loc").noconvert(), nb::arg("block_table").noconvert(), nb::arg("scale"), nb::arg("window"),
                nb::arg("softcap"), nb::arg("out").noconvert());
    context.def("copy_blocks", &copy_blocks, nb::arg("kv"), nb::arg("sources").noconvert(), nb::arg("targets").noconvert());
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "CPU kernels of Octavo.";
    m.def("known_isa_levels", &known_isa_levels, "Instruction-set levels in this build, weakest first.");
    m.def("isa_levels", &isa_levels, "Those of them this machine can run.");
    m.def("isa", [] { return std::string(kernels_for("").name); }, "The level in force: OCTAVO_CPU_ISA, else the strongest.");
    m.def("available_threads", &available_threads, "Processors by affinity and control-group quota.");
    m.def("affinity_cpus", &affinity_cpus);
    m.def("cgroup_cpus", &cgroup_cpus, nb::arg("groups_file") = "/proc/self/cgroup", nb::arg("root") = "/sys/fs/cgroup",
          "Whole processors granted by the control groups; 0 means no limit.");
    bind_handles(m);
    bind_context(m);
    bind_limits(m);
}

}  // namespace octavo
