// Every item of every job runs exactly once, whatever the pauses between jobs; meant for ThreadSanitizer, which sees the
// races that tests through Python cannot (see README.md). Exit status 0: right.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <vector>

#include "thread_pool.h"

int main() {
    for (int threads = 1; threads <= 5; ++threads) {
        octavo::ThreadPool pool(threads);
        for (int job = 0; job < 3000; ++job) {
            std::vector<int> hits(size_t(job % 40), 0);
            int64_t unshared = job;  // written before the job, read inside it
            pool.run(int64_t(hits.size()), [&](int64_t item) { hits[size_t(item)] += 1 + int(unshared - job); });
            for (int hit : hits)
                if (hit != 1) return std::printf("%d threads, job %d: an item ran %d times\n", threads, job, hit), 1;
            if (job % 500 == 499) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough to park
        }
        {
            const octavo::ThreadPool::Busy busy(pool);  // workers wait for the next job without parking, also past the spin
            for (int job = 0; job < 40; ++job) {
                std::atomic<int> done{0};
                pool.run(job % 7, [&](int64_t) { done.fetch_add(1); });
                if (done != job % 7) return std::printf("%d threads, busy job %d: %d items\n", threads, job, done.load()), 1;
                if (job % 8 == 7) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        }
        const octavo::ThreadPool::Busy destroyed_while_busy(pool);  // ends before the pool, whose end stops waiting workers
    }
    return 0;
}
