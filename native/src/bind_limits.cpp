// Python's face of machine_limits.h.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "bindings.h"
#include "machine_limits.h"

namespace octavo {

namespace {
std::pair<double, int64_t> pair_of(Timed timed) { return {timed.seconds, timed.work}; }
}  // namespace

void bind_limits(nb::module_& m) {
    m.def("probe_levels", &probe_levels, "Levels whose peak can be measured here.");
    m.def("nothing", [](const Context&) {}, nb::arg("context"), "A call that does nothing, to time calls.");
    nb::class_<Limits>(m, "Limits", "Times loops that do nothing but read or multiply. Results are (seconds, work).")
        .def("__init__", [](Limits* self, int threads, int64_t bytes) {
            if (threads < 1 || threads > 1024) refuse("threads", "must be between 1 and 1024");
            if (bytes < 1 || bytes > (int64_t(1) << 36)) refuse("bytes", "must be between 1 and 2^36");
            const nb::gil_scoped_release nogil;
            new (self) Limits(threads, bytes);
        }, nb::arg("threads"), nb::arg("bytes"))
        .def_prop_ro("threads", &Limits::threads)
        .def("read", [](Limits& self, const std::string& level, int64_t bytes, int64_t passes, int64_t ahead) {
            const nb::gil_scoped_release nogil;
            return pair_of(self.read(level, bytes, passes, ahead));
        }, nb::arg("level"), nb::arg("bytes"), nb::arg("passes"), nb::arg("ahead") = 0)
        .def("compute", [](Limits& self, const std::string& level, const std::string& what, int64_t rounds) {
            const nb::gil_scoped_release nogil;
            return pair_of(self.compute(level, what, rounds));
        }, nb::arg("level"), nb::arg("what"), nb::arg("rounds"))
        .def("fork_join", [](Limits& self, int64_t jobs) {
            const nb::gil_scoped_release nogil;
            return pair_of(self.fork_join(jobs));
        }, nb::arg("jobs"));
}

}  // namespace octavo
