#include "thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <system_error>

namespace octavo {

namespace {

constexpr uint64_t kOpen = uint64_t(1) << 31;
constexpr uint64_t kInside = kOpen - 1;
constexpr auto kSpin = std::chrono::microseconds(200);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : workers_(new std::vector<std::thread>), owner_(getpid()) {
    start(threads > 1 ? size_t(threads) - 1 : 0);
}

void ThreadPool::start(size_t workers) {
    workers_->reserve(workers);
    for (size_t i = 0; i < workers; ++i) {
        try {
            workers_->emplace_back([this] { worker(); });
        } catch (const std::system_error&) {
            break;  // the system grants no more threads: fewer are slower, not wrong
        }
    }
}

ThreadPool::~ThreadPool() {
    if (getpid() != owner_) return;  // a forked child: the threads do not exist here, their handles cannot be joined
    stop_.store(true);
    wake_.fetch_add(1);
    wake_.notify_all();
    for (std::thread& thread : *workers_) thread.join();
    delete workers_;
}

// In a forked child. The old handles name threads that are not here: they can be neither joined nor destroyed.
void ThreadPool::restart() {
    const size_t workers = workers_->size();
    workers_ = new std::vector<std::thread>;
    parked_.store(0);
    busy_.store(0);
    owner_ = getpid();
    forked_ = false;
    start(workers);
}

void ThreadPool::run_job(int64_t items, Function function, const void* argument) {
    if (forked_) restart();
    function_ = function;
    argument_ = argument;
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(epoch << 32 | kOpen);
    if (parked_.load() > 0) {
        wake_.fetch_add(1);
        wake_.notify_all();
    }
    take_items();
    state_.fetch_and(~kOpen);
    for (int spins = 0; state_.load(std::memory_order_acquire) & kInside; ++spins) {
        if (spins < 20000) pause();
        else sched_yield();  // a worker lost its processor inside an item
    }
}

void ThreadPool::take_items() {
    for (;;) {
        const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
        if (item >= items_) return;
        function_(argument_, item);
    }
}

// True when a job newer than last_epoch is open, false to stop.
bool ThreadPool::wait_for_job(uint32_t last_epoch) {
    const auto ready = [&] {
        const uint64_t state = state_.load();
        return (state & kOpen) && uint32_t(state >> 32) != last_epoch;
    };
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    for (;;) {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            if (stop_.load(std::memory_order_relaxed)) return false;
            pause();
        }
        if (std::chrono::steady_clock::now() < deadline) continue;
        if (busy_.load(std::memory_order_relaxed) == 0) break;
        sched_yield();
    }
    for (;;) {
        // The caller publishes the job, then looks at parked_; this thread counts itself, then looks for a job. Whatever
        // the order, one of the two sees the other.
        parked_.fetch_add(1);
        const uint32_t seen = wake_.load();
        if (!ready() && !stop_.load()) wake_.wait(seen);
        parked_.fetch_sub(1);
        if (stop_.load()) return false;
        if (ready()) return true;
    }
}

void ThreadPool::worker() {
    const FloatMode mode;  // a thread begins with the mode of the one that made it
    uint32_t last_epoch = 0;
    while (wait_for_job(last_epoch)) {
        uint64_t state = state_.load();
        if (!(state & kOpen) || uint32_t(state >> 32) == last_epoch) continue;
        if (!state_.compare_exchange_strong(state, state + 1)) continue;
        last_epoch = uint32_t(state >> 32);
        take_items();
        state_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace octavo
