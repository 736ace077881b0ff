// Holds fork() back while an operation of a context runs, so that no child starts with the context locked or a job half
// done; the child's pool then makes workers of its own.
//
// Owner: a Context has one, made after its mutex and pool. The list of them all is the one thing here that outlives an object.
#pragma once
#include <mutex>

#include "thread_pool.h"

namespace octavo {

class ForkGuard {
public:
    // `mutex` is locked by whoever uses `pool`.
    ForkGuard(std::mutex& mutex, ThreadPool& pool);
    ~ForkGuard();
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;

private:
    friend struct ForkHandlers;
    std::mutex& mutex_;
    ThreadPool& pool_;
};

}  // namespace octavo
