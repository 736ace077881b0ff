// NumPy arrays as the core's views. Only dtype and rank are matched by nanobind; layout is checked here, with the GIL
// held. Arguments are never converted: an array of another dtype is a TypeError, not a silent copy.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "context.h"

namespace octavo {

namespace nb = nanobind;

template <typename T> using Array1 = nb::ndarray<T, nb::ndim<1>, nb::device::cpu>;
template <typename T> using Array2 = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;
template <typename T> using Array3 = nb::ndarray<T, nb::ndim<3>, nb::device::cpu>;

[[noreturn]] inline void refuse(const char* name, const char* why) { throw nb::value_error((std::string(name) + " " + why).c_str()); }

template <typename T> void check_aligned(const T* data, const char* name) {
    if (reinterpret_cast<uintptr_t>(data) % alignof(T)) refuse(name, "must be aligned to its item size");
}

template <typename T> Vector<T> vector(const Array1<T>& a, const char* name) {
    if (a.shape(0) > 1 && a.stride(0) != 1) refuse(name, "must be contiguous");
    check_aligned(a.data(), name);
    return {a.data(), int64_t(a.shape(0))};
}

// Rows may be any distance apart; what is written to must not overlap itself.
template <typename T> Matrix<T> matrix(const Array2<T>& a, const char* name) {
    const int64_t rows = int64_t(a.shape(0)), cols = int64_t(a.shape(1));
    if (rows > 0 && cols > 1 && a.stride(1) != 1) refuse(name, "must be contiguous along its rows");
    check_aligned(a.data(), name);
    const int64_t stride = rows > 1 ? a.stride(0) : cols;
    if constexpr (!std::is_const_v<T>)
        if (stride < cols) refuse(name, "must have rows that do not overlap");
    return {a.data(), rows, cols, stride};
}

// [T, H, D] with contiguous rows, as [T, H * D].
template <typename T> Matrix<T> flat_matrix(const Array3<T>& a, const char* name) {
    const int64_t rows = int64_t(a.shape(0)), heads = int64_t(a.shape(1)), dim = int64_t(a.shape(2));
    if (rows > 0 && heads > 0 && dim > 0 && ((dim > 1 && a.stride(2) != 1) || (heads > 1 && a.stride(1) != dim))) refuse(name, "must be contiguous along its rows");
    check_aligned(a.data(), name);
    const int64_t stride = rows > 1 ? a.stride(0) : heads * dim;
    if constexpr (!std::is_const_v<T>)
        if (stride < heads * dim) refuse(name, "must have rows that do not overlap");
    return {a.data(), rows, heads * dim, stride};
}

inline KvType kv_type(const std::string& name) {
    if (name == "f32") return KvType::F32;
    if (name == "bf16") return KvType::BF16;
    if (name == "f16") return KvType::F16;
    if (name == "int8") return KvType::I8;
    throw nb::value_error(("unknown KV dtype " + name + ": choose f32, bf16, f16 or int8").c_str());
}

// The kernels' layout of a PackedTensor, and how many values of it share a scale.
struct LayoutName {
    const char* name;
    Layout layout;
    int64_t group;
};

inline LayoutName layout_of(const std::string& name) {
    static const LayoutName layouts[] = {
        {"f32", Layout::F32, 1},       {"f16", Layout::F16, 1},       {"bf16", Layout::BF16, 1},
        {"q4_b32", Layout::Q4B32, 32}, {"q8_b32", Layout::Q8B32, 32}, {"q8_b16", Layout::Q8B16, 16},
        {"q4_g128", Layout::Q4B32, 128}, {"q8_g128", Layout::Q8B32, 128},
    };
    for (const auto& entry : layouts)
        if (name == entry.name) return entry;
    throw nb::value_error(("unknown weight layout " + name).c_str());
}

}  // namespace octavo
