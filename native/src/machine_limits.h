// Measures what this machine can do at most, on threads of its own: `octavo doctor --full`.
//
// Owner: the Python object _native.Limits (octavo/bench/limits.py decides what is measured, and how often).
#pragma once
#include <string>
#include <vector>

#include "memory.h"
#include "probes.h"
#include "thread_pool.h"

namespace octavo {

// Seconds, and the work that was done in them.
struct Timed {
    double seconds;
    int64_t work;
};

class Limits {
public:
    // Maps `bytes` (rounded up to whole kilobytes a thread) and writes all of them.
    Limits(int threads, int64_t bytes);

    int threads() const { return pool_.threads(); }
    // Each thread reads its own share of the first `bytes`, `passes` times over. work: bytes read.
    Timed read(const std::string& level, int64_t bytes, int64_t passes, int64_t ahead);
    // `what`: f32, int16 or int8; `rounds` on each thread. work: products.
    Timed compute(const std::string& level, const std::string& what, int64_t rounds);
    // Jobs in which every thread meets every other, one after the other. work: jobs.
    Timed fork_join(int64_t jobs);

private:
    template <typename F> Timed timed(const F& work_of_thread);

    ThreadPool pool_;
    Memory memory_;
};

// Levels that can be measured on this machine: those it can run, and that have probes.
std::vector<std::string> probe_levels();

}  // namespace octavo
