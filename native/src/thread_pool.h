// The workers of one context. Between the operations of a step they spin, so that an operation starts in well under a
// microsecond; after a while without work they park, unless the caller has said that more is coming (Busy).
//
// A job is a number of items and a function; threads take items from an atomic counter, the caller included, and the
// caller returns when all items are done. A worker that wakes late finds the job closed: nobody ever waits for a
// thread that has not taken an item. Which thread computes an item must not matter to its result.
//
// After fork() the child has none of the workers; told so by forked(), it makes its own with its first job. No job may be
// running at the fork (fork_guard.h). One thread means no worker is ever made.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace octavo {

// IEEE arithmetic while it lives, denormals included: a library may have told the calling thread to flush them, and a result
// must not depend on which thread computed it.
class FloatMode {
public:
#if defined(__SSE__)
    FloatMode() : before_(_mm_getcsr()) { if (before_ != kDefault) _mm_setcsr(kDefault); }
    ~FloatMode() { if (before_ != kDefault) _mm_setcsr(before_); }
private:
    static constexpr unsigned kDefault = 0x1f80;  // round to nearest, no traps; Intel SDM volume 1, 10.2.3
    unsigned before_;
#else
    FloatMode() {}
#endif
public:
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;
};

class ThreadPool {
public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Calls function(item) for every item in [0, items), in any order. One caller at a time. function must not throw.
    template <typename F> void run(int64_t items, const F& function) {
        const FloatMode mode;
        if (items <= 1 || workers_->empty()) {
            for (int64_t item = 0; item < items; ++item) function(item);
            return;
        }
        run_job(items, [](const void* f, int64_t item) { (*static_cast<const F*>(f))(item); }, &function);
    }

    // Between the jobs of a life of this object workers do not park; where processors are scarce they yield.
    class Busy {
    public:
        explicit Busy(ThreadPool& pool) : pool_(pool) { pool_.busy_.fetch_add(1, std::memory_order_relaxed); }
        ~Busy() { pool_.busy_.fetch_sub(1, std::memory_order_relaxed); }
        Busy(const Busy&) = delete;
        Busy& operator=(const Busy&) = delete;

    private:
        ThreadPool& pool_;
    };

    // In the child of a fork, before its first job.
    void forked() { forked_ = true; }

    int threads() const { return int(workers_->size()) + 1; }

private:
    using Function = void (*)(const void*, int64_t);
    void run_job(int64_t items, Function function, const void* argument);
    void take_items();
    void start(size_t workers);
    void restart();
    void worker();
    bool wait_for_job(uint32_t last_epoch);

    // The job. Written by the caller while no worker is inside, published by state_.
    Function function_ = nullptr;
    const void* argument_ = nullptr;
    int64_t items_ = 0;
    alignas(64) std::atomic<int64_t> next_{0};
    // Epoch in the high 32 bits; then bit 31: the job may be entered; then the number of workers inside.
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<uint32_t> wake_{0};
    std::atomic<uint32_t> parked_{0};
    std::atomic<bool> stop_{false};
    std::atomic<int> busy_{0};

    std::vector<std::thread>* workers_;
    pid_t owner_;
    bool forked_ = false;
};

}  // namespace octavo
