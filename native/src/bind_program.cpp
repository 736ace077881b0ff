// Programs in Python: arguments are checked as those of the operations themselves (module.cpp); the GIL is released
// during a replay but for a look at signals, so that Ctrl-C need not wait for the end of a long step.
#include <nanobind/stl/vector.h>

#include <chrono>

#include "arrays.h"
#include "bindings.h"
#include "program.h"

namespace octavo {

namespace {

using In2 = Array2<const float>;
using Out2 = Array2<float>;
using Floats = Array1<const float>;
using Ints = Array1<const int32_t>;
using Longs = Array1<const int64_t>;
using Table = Array2<const int32_t>;
constexpr auto kSignalPeriod = std::chrono::milliseconds(50);

BatchInputs batch_of(const Ints& token_ids, const Ints& positions, const Ints& query_start_loc, const Ints& logits_rows,
                     const std::vector<Longs>& slots, const std::vector<Table>& block_tables, int64_t num_generated, int64_t num_generated_logits) {
    BatchInputs batch{vector(token_ids, "token_ids"), vector(positions, "positions"), vector(query_start_loc, "query_start_loc"),
                      vector(logits_rows, "rows"), {}, {}, num_generated, num_generated_logits};
    for (const Longs& s : slots) batch.slots.push_back(vector(s, "slot_mapping"));
    for (const Table& t : block_tables) batch.block_tables.push_back(matrix(t, "block_table"));
    return batch;
}

void replay(Context& context, const Program& program, const Ints& token_ids, const Ints& positions, const Ints& query_start_loc,
            const Ints& logits_rows, const std::vector<Longs>& slots, const std::vector<Table>& block_tables, int64_t num_generated, int64_t num_generated_logits) {
    const BatchInputs batch = batch_of(token_ids, positions, query_start_loc, logits_rows, slots, block_tables, num_generated, num_generated_logits);
    const nb::gil_scoped_release nogil;
    auto looked = std::chrono::steady_clock::now();
    program.replay(context, batch, [&] {
        const auto now = std::chrono::steady_clock::now();
        if (now - looked < kSignalPeriod) return;
        looked = now;
        const nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals()) throw nb::python_error();
    });
}

}  // namespace

void bind_program(nb::module_& m, nb::class_<Context>& context) {
    nb::class_<Program>(m, "Program", "The operations of a forward pass, for Context.replay. Keeps alive whatever they read.")
        .def("__init__", [](Program* self, int64_t capacity_rows, const Ints& token_ids, const Ints& positions, const Ints& query_start_loc,
                            const Ints& logits_rows, const std::vector<Longs>& slots, const std::vector<Table>& block_tables, int64_t num_generated, int64_t num_generated_logits) {
            if (capacity_rows < 1) refuse("capacity_rows", "must be at least 1");
            new (self) Program(capacity_rows, batch_of(token_ids, positions, query_start_loc, logits_rows, slots, block_tables, num_generated, num_generated_logits));
        }, nb::arg("capacity_rows"), nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(), nb::arg("query_start_loc").noconvert(),
             nb::arg("logits_rows").noconvert(), nb::arg("slot_mapping").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("num_generated"), nb::arg("num_generated_logits"))
        .def("add_chunk", [](Program& p, const Array1<uint8_t>& chunk) { p.add_chunk(chunk.data(), int64_t(chunk.shape(0))); },
             nb::keep_alive<1, 2>(), nb::arg("chunk").noconvert())
        .def("embedding", [](Program& p, const Ints& ids, const PackedWeight& weight, const Out2& out) {
            p.embedding(vector(ids, "token_ids"), weight, matrix(out, "out"));
        }, nb::keep_alive<1, 3>())
        .def("linear", [](Program& p, const In2& x, const PackedWeight& weight, int64_t num_generated, const Out2& out) {
            p.linear(matrix(x, "x"), weight, num_generated, matrix(out, "out"));
        }, nb::keep_alive<1, 3>())
        .def("rms_norm", [](Program& p, const In2& x, const Floats& weight, float eps, const Out2& out) {
            p.rms_norm(matrix(x, "x"), vector(weight, "weight"), eps, matrix(out, "out"));
        }, nb::keep_alive<1, 3>(), nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"), nb::arg("out").noconvert())
        .def("add_rms_norm", [](Program& p, const Out2& x, const In2& y, const Floats& weight, float eps, const Out2& out) {
            p.add_rms_norm(matrix(x, "x"), matrix(y, "y"), vector(weight, "weight"), eps, matrix(out, "out"));
        }, nb::keep_alive<1, 4>(), nb::arg("x").noconvert(), nb::arg("y").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
             nb::arg("out").noconvert())
        .def("add", [](Program& p, const Out2& x, const In2& y) { p.add(matrix(x, "x"), matrix(y, "y")); })
        .def("silu_mul", [](Program& p, const In2& gate_up, const Out2& out) { p.silu_mul(matrix(gate_up, "gate_up"), matrix(out, "out")); })
        .def("take_rows", [](Program& p, const In2& x, const Ints& rows, const Out2& out) {
            p.take_rows(matrix(x, "x"), vector(rows, "rows"), matrix(out, "out"));
        })
        .def("rope_kv_write", [](Program& p, const In2& qkv, const RopeTable& rope, KvPool& kv, int64_t layer, const Ints& positions,
                                 const Longs& slots, int64_t num_heads, const Array3<float>& q) {
            p.rope_kv_write(matrix(qkv, "qkv"), rope, kv, layer, vector(positions, "positions"), vector(slots, "slot_mapping"), num_heads,
                            flat_matrix(q, "q"));
        }, nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
        .def("attend", [](Program& p, const Array3<const float>& q, const KvPool& kv, int64_t layer, const Ints& positions,
                          const Ints& query_start_loc, const Table& block_table, float scale, int64_t window, float softcap, const Out2& out) {
            p.attend(flat_matrix(q, "q"), kv, layer, {vector(positions, "positions"), vector(query_start_loc, "query_start_loc"), matrix(block_table, "block_table")},
                     {scale, window, softcap}, matrix(out, "out"));
        }, nb::keep_alive<1, 3>())
        .def("__len__", &Program::size)
        .def_prop_ro("num_fused", &Program::fused, "Operations that run as part of the linear after them.");
    context.def("replay", &replay, nb::arg("program"), nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(),
                nb::arg("query_start_loc").noconvert(), nb::arg("logits_rows").noconvert(), nb::arg("slot_mapping").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("num_generated"), nb::arg("num_generated_logits"));
}

}  // namespace octavo
