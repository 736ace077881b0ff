// Python's view of packed weights, rotary tables and KV pools: opaque handles.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "arrays.h"
#include "bindings.h"

namespace octavo {

namespace {

using AnyArray = nb::ndarray<nb::ro, nb::device::cpu>;
using AnyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;

// An array of two dimensions, or of three whose middle one counts blocks. Strides in items: of the first dimension, and of
// the one before the last of three (`step`), or of the last of two.
struct Items {
    const void* data;
    int64_t rows, cols, stride, step;
};

// `a`, whose items must be of one of the allowed types; which one through `is_first`.
template <typename Array> Items items_of(const Array& a, nb::dlpack::dtype first, nb::dlpack::dtype second, bool* is_first, const char* name) {
    *is_first = a.dtype() == first;
    if (!*is_first && a.dtype() != second) throw nb::type_error((std::string(name) + " has a dtype its layout does not use").c_str());
    if (a.ndim() != 2 && a.ndim() != 3) refuse(name, "must have two dimensions, or three");
    if (reinterpret_cast<uintptr_t>(a.data()) % size_t(a.dtype().bits / 8)) refuse(name, "must be aligned to its item size");
    const int64_t rows = int64_t(a.shape(0)), middle = int64_t(a.shape(1)), last = a.ndim() == 3 ? int64_t(a.shape(2)) : 1;
    const int64_t step = middle > 1 ? a.stride(1) : last;
    return {a.data(), rows, middle * last, rows > 1 ? a.stride(0) : middle * step, step};
}

nb::dlpack::dtype item_type(Layout layout) {
    if (layout == Layout::F32) return nb::dtype<float>();
    if (layout == Layout::Q4B32) return nb::dtype<uint8_t>();
    return is_quantized(layout) ? nb::dtype<int8_t>() : nb::dtype<uint16_t>();
}

// Halves arrive as uint16: their bits.
void add_scales(PartSource& part, const std::optional<AnyRows>& scale, const std::optional<AnyRows>& offset, int64_t per_row) {
    if (!scale) refuse("scale", "is needed by a quantised layout");
    const Items s = items_of(*scale, nb::dtype<uint16_t>(), nb::dtype<float>(), &part.scale_f16, "scale");
    if (s.rows != part.n || s.cols != per_row) refuse("scale", "must be [N, K / block]");
    part.scale = s.data;
    part.scale_stride = s.stride;
    part.scale_step = s.step;
    if (!offset) return;
    bool offset_f16;
    const Items o = items_of(*offset, nb::dtype<uint16_t>(), nb::dtype<float>(), &offset_f16, "offset");
    if (o.rows != part.n || o.cols != per_row) refuse("offset", "must be [N, K / block]");
    if (offset_f16 != part.scale_f16) throw nb::type_error("offset must have the dtype of scale");
    part.offset = o.data;
    part.offset_stride = o.stride;
    part.offset_step = o.step;
}

// Rows, or blocks, of neighbouring items; K follows from them.
void add_data(PartSource& part, const AnyArray& data) {
    const nb::dlpack::dtype item = item_type(part.layout);
    bool unused;
    const Items items = items_of(data, item, item, &unused, "data");
    const int64_t last = int64_t(data.shape(data.ndim() - 1)), block = part.layout == Layout::Q4B32 ? 16 : kBlock;
    if (items.rows > 0 && last > 1 && data.stride(data.ndim() - 1) != 1) refuse("data", "must be contiguous along its rows");
    if (data.ndim() == 3 && (!is_quantized(part.layout) || last != block)) refuse("data", "of three dimensions must be [N, K / 32, bytes of a block]");
    part.n = items.rows;
    part.k = part.layout == Layout::Q4B32 ? items.cols * 2 : items.cols;
    part.data = items.data;
    part.data_stride = items.stride;
    part.block_stride = data.ndim() == 3 ? items.step : block;
}

void pack_part(Context& context, PackedWeight& weight, const std::string& layout_name, const AnyArray& data,
               std::optional<AnyRows> scale, std::optional<AnyRows> offset, int zero) {
    PartSource part{};
    const LayoutName layout = layout_of(layout_name);
    part.layout = layout.layout;
    add_data(part, data);
    part.zero = zero;
    if (is_quantized(part.layout)) {
        if (part.k % layout.group) refuse("data", "must have whole blocks along K");
        if (zero < -255 || zero > 255) refuse("zero", "must be between -255 and 255");
        part.scale_blocks = std::max<int64_t>(1, layout.group / kBlock);
        add_scales(part, scale, offset, part.k / layout.group);
    } else if (scale || offset || zero) {
        refuse("scale, offset and zero", "belong to quantised layouts");
    }
    const nb::gil_scoped_release nogil;
    context.pack_part(weight, part);
}

void bind_weight(nb::module_& m) {
    nb::class_<PackedWeight>(m, "PackedWeight", "A weight in the kernels' layout. Made by CpuOps.pack_linear.")
        .def(nb::init<int64_t>(), nb::arg("k"))
        .def("set_bias", [](PackedWeight& w, const Array1<const float>& bias) {
            const auto b = vector(bias, "bias");
            w.set_bias(b.data, b.size);
        }, nb::arg("bias").noconvert())
        .def_prop_ro("k", &PackedWeight::k)
        .def_prop_ro("columns", &PackedWeight::columns)
        .def_prop_ro("nbytes", &PackedWeight::bytes);
}

void bind_rope(nb::module_& m) {
    nb::class_<RopeTable>(m, "RopeTable", "cos and sin of every position.")
        .def("__init__", [](RopeTable* self, const Array2<const float>& cos, const Array2<const float>& sin) {
            const auto c = matrix(cos, "cos"), s = matrix(sin, "sin");
            if (c.rows != s.rows || c.cols != s.cols || c.rows < 1 || c.cols < 1) refuse("cos and sin", "must have the same shape [positions, dim / 2]");
            new (self) RopeTable{c.rows, c.cols, {}, {}};
            for (const auto& [from, to] : {std::pair{c, &self->cos}, std::pair{s, &self->sin}}) {
                to->resize(size_t(c.rows * c.cols));
                for (int64_t t = 0; t < c.rows; ++t) std::copy_n(from.data + t * from.stride, c.cols, to->data() + t * c.cols);
            }
        }, nb::arg("cos").noconvert(), nb::arg("sin").noconvert())
        .def_ro("max_position", &RopeTable::max_position);
}

template <typename T> T* block_values(const nb::ndarray<T, nb::ndim<5>, nb::c_contig, nb::device::cpu>& a, const KvPool& kv, int64_t block) {
    const KvShape& s = kv.shape();
    const int64_t shape[5] = {s.layers, 2, s.kv_heads, kTokens, s.head_dim};
    for (size_t i = 0; i < 5; ++i)
        if (int64_t(a.shape(i)) != shape[i]) refuse("values", "must be [layers, 2, KV heads, block size, head_dim]");
    check_aligned(a.data(), "values");
    if (block < 0 || block >= s.blocks) throw nb::index_error("the block is outside the KV pool");
    return a.data();
}

void bind_kv(nb::module_& m) {
    using Block5 = nb::ndarray<float, nb::ndim<5>, nb::c_contig, nb::device::cpu>;
    using ConstBlock5 = nb::ndarray<const float, nb::ndim<5>, nb::c_contig, nb::device::cpu>;
    nb::class_<KvPool>(m, "KvPool", "The KV blocks of one group. Blocks hold 16 tokens.")
        .def("__init__", [](KvPool* self, int64_t layers, int64_t blocks, int64_t kv_heads, int64_t head_dim, const std::string& dtype) {
            new (self) KvPool({layers, blocks, kv_heads, head_dim, kv_type(dtype)});
        }, nb::arg("layers"), nb::arg("blocks"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("dtype"))
        .def_static("block_bytes", [](int64_t layers, int64_t kv_heads, int64_t head_dim, const std::string& dtype) {
            return KvPool::bytes_per_block({layers, 1, kv_heads, head_dim, kv_type(dtype)});
        }, nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("dtype"))
        .def("export_block", [](const KvPool& kv, int64_t block, const Block5& values) {
            kv.export_block(block, block_values(values, kv, block));
        }, nb::arg("block"), nb::arg("values").noconvert())
        .def("import_block", [](KvPool& kv, int64_t block, const ConstBlock5& values) {
            kv.import_block(block, block_values(values, kv, block));
        }, nb::arg("block"), nb::arg("values").noconvert())
        .def_prop_ro("nbytes", &KvPool::bytes)
        .def_prop_ro("layers", [](const KvPool& kv) { return kv.shape().layers; })
        .def_prop_ro("kv_heads", [](const KvPool& kv) { return kv.shape().kv_heads; })
        .def_prop_ro("head_dim", [](const KvPool& kv) { return kv.shape().head_dim; });
}

}  // namespace

void bind_handles(nb::module_& m) {
    bind_weight(m);
    bind_rope(m);
    bind_kv(m);
}

void bind_packing(nb::class_<Context>& context) {
    context.def("pack_part", &pack_part, nb::arg("weight"), nb::arg("layout"), nb::arg("data").noconvert(),
                nb::arg("scale").noconvert().none(), nb::arg("offset").noconvert().none(), nb::arg("zero"));
}

}  // namespace octavo
