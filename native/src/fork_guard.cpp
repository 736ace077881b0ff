#include "fork_guard.h"

#include <pthread.h>

#include <algorithm>
#include <vector>

namespace octavo {

// Called by fork() in the thread that forks: before, and afterwards in the parent and in the child.
struct ForkHandlers {
    std::mutex mutex;  // of the list; locked over the fork, so that it is whole in the child
    std::vector<ForkGuard*> guards;

    static ForkHandlers& all() {
        static ForkHandlers* const handlers = new ForkHandlers;  // never destroyed: a fork may come at the very end
        return *handlers;
    }
    ForkHandlers() {
        pthread_atfork([] { all().before(); }, [] { all().after(); }, [] {
            for (ForkGuard* guard : all().guards) guard->pool_.forked();
            all().after();
        });
    }
    void before() {
        mutex.lock();
        for (ForkGuard* guard : guards) guard->mutex_.lock();
    }
    void after() {
        for (ForkGuard* guard : guards) guard->mutex_.unlock();
        mutex.unlock();
    }
};

ForkGuard::ForkGuard(std::mutex& mutex, ThreadPool& pool) : mutex_(mutex), pool_(pool) {
    ForkHandlers& all = ForkHandlers::all();
    const std::lock_guard lock(all.mutex);
    all.guards.push_back(this);
}

ForkGuard::~ForkGuard() {
    ForkHandlers& all = ForkHandlers::all();
    const std::lock_guard lock(all.mutex);
    all.guards.erase(std::find(all.guards.begin(), all.guards.end(), this));
}

}  // namespace octavo
