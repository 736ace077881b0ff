#include "machine_limits.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>

#include "machine.h"

namespace octavo {

namespace {

constexpr int64_t kUnit = 1024;  // what a thread's share of the memory is a multiple of

int64_t rounded(int64_t bytes, int threads) { return (bytes + kUnit * threads - 1) / (kUnit * threads) * (kUnit * threads); }

const Probes* probes_of(const std::string& level) {
    static const Probes* const all[] = {
        &kPortableProbes,
#ifdef OCTAVO_X86_LEVELS
        &kAvx2Probes,
#ifndef OCTAVO_SIMDE
        &kAvx512VnniProbes,
#endif
#endif
    };
    // No loop of tiles yet: "amx" is measured as the level whose registers and generated rows it shares.
    const std::string name = level == "amx" ? "avx512vnni" : level;
    for (const Probes* probes : all)
        if (probes->name == name) return probes;
    return nullptr;
}

const Probes& usable_probes(const std::string& level) {
    const std::vector<std::string> levels = probe_levels();
    if (std::find(levels.begin(), levels.end(), level) == levels.end())
        throw std::invalid_argument("level " + level + " cannot be measured here");
    return *probes_of(level);
}

}  // namespace

std::vector<std::string> probe_levels() {
    std::vector<std::string> found;
    for (const std::string& level : isa_levels())
        if (probes_of(level)) found.push_back(level);
    return found;
}

Limits::Limits(int threads, int64_t bytes) : pool_(threads), memory_(rounded(bytes, threads), "measuring bandwidth") {
    const int64_t share = memory_.size() / pool_.threads();
    // Written by the thread that reads it, so that the pages lie where that thread does.
    pool_.run(pool_.threads(), [&](int64_t thread) {
        int32_t* values = reinterpret_cast<int32_t*>(memory_.data() + thread * share);
        std::fill(values, values + share / 4, 1);
    });
}

// Calls work_of_thread(thread) once for each and adds up what they return. One job before wakes the workers.
template <typename F> Timed Limits::timed(const F& work_of_thread) {
    std::vector<int64_t> work(size_t(pool_.threads()) * 8);  // a cache line each
    pool_.run(pool_.threads(), [](int64_t) {});
    const auto begin = std::chrono::steady_clock::now();
    pool_.run(pool_.threads(), [&](int64_t thread) { work[size_t(thread) * 8] = work_of_thread(thread); });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    Timed result{seconds.count(), 0};
    for (int64_t one : work) result.work += one;
    return result;
}

Timed Limits::read(const std::string& level, int64_t bytes, int64_t passes, int64_t ahead) {
    const Probes& probes = usable_probes(level);
    const int64_t wanted = bytes > 0 && bytes <= memory_.size() ? rounded(bytes, threads()) : 0;
    if (wanted < 1 || wanted > memory_.size()) throw std::invalid_argument("bytes must be positive and at most what was reserved");
    if (passes < 1 || ahead < 0) throw std::invalid_argument("passes must be positive, ahead not negative");
    const int64_t share = wanted / threads();
    Timed result = timed([&](int64_t thread) {
        int64_t sum = 0;
        for (int64_t pass = 0; pass < passes; ++pass) sum += probes.read(memory_.data() + thread * share, share, ahead);
        return sum;
    });
    result.work *= 4;  // the sum of ones is the number of integers
    return result;
}

Timed Limits::compute(const std::string& level, const std::string& what, int64_t rounds) {
    const Probes& probes = usable_probes(level);
    const auto probe = what == "f32" ? probes.f32 : what == "int16" ? probes.int16 : what == "int8" ? probes.int8 : nullptr;
    if (!probe) throw std::invalid_argument("what must be f32, int16 or int8");
    if (rounds < 1 || rounds > (1 << 20)) throw std::invalid_argument("rounds must be between 1 and 2^20");
    return timed([&](int64_t) { return probe(rounds); });
}

Timed Limits::fork_join(int64_t jobs) {
    if (jobs < 1) throw std::invalid_argument("jobs must be positive");
    const int64_t items = threads();
    std::atomic<int64_t> arrived{0};
    // Each item waits for the others, else one thread would take all of them; not for ever, since a forked child is alone.
    const auto meet = [&](int64_t job) {
        const int64_t all = (job + 1) * items;
        arrived.fetch_add(1);
        for (int spins = 0; arrived.load() < all && spins < 20000; ++spins)
            if (spins > 2000) sched_yield();
    };
    pool_.run(items, [](int64_t) {});
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t job = 0; job < jobs; ++job) pool_.run(items, [&](int64_t) { meet(job); });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    return {seconds.count(), jobs};
}

}  // namespace octavo
