#include "machine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#ifdef __linux__
#include <sched.h>
#ifdef OCTAVO_X86_LEVELS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace octavo {

int affinity_cpus() {
#ifdef __linux__
    for (int cpus = 1024; cpus <= (1 << 18); cpus *= 4) {  // the kernel refuses a mask smaller than its own
        cpu_set_t* set = CPU_ALLOC(cpus);
        if (!set) break;
        const size_t size = CPU_ALLOC_SIZE(cpus);
        const bool known = sched_getaffinity(0, size, set) == 0;
        const int count = known ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (known) return std::max(1, count);
    }
#endif
    return std::max(1, int(std::thread::hardware_concurrency()));
}

namespace {

bool read_line(const std::string& path, std::string& line) {
    std::ifstream file(path);
    return bool(std::getline(file, line));
}

// Processors granted by one group's directory, infinity when it sets no limit.
double quota_v2(const std::string& directory) {
    std::string line, quota;
    double period = 0;
    if (!read_line(directory + "/cpu.max", line)) return INFINITY;
    std::istringstream words(line);
    if (!(words >> quota >> period) || quota == "max" || !(period > 0)) return INFINITY;
    const double value = std::atof(quota.c_str());
    return value > 0 ? value / period : INFINITY;
}

double quota_v1(const std::string& directory) {
    std::string quota, period;
    if (!read_line(directory + "/cpu.cfs_quota_us", quota) || !read_line(directory + "/cpu.cfs_period_us", period)) return INFINITY;
    const double q = std::atof(quota.c_str()), p = std::atof(period.c_str());
    return q > 0 && p > 0 ? q / p : INFINITY;
}

template <typename Quota> double tightest(const std::string& mount, std::string group, Quota quota) {
    double least = quota(mount);
    while (group.size() > 1) {
        least = std::min(least, quota(mount + group));
        const size_t slash = group.rfind('/');
        if (slash == std::string::npos) break;
        group.resize(slash);
    }
    return least;
}

}  // namespace

int cgroup_cpus(const std::string& groups_file, const std::string& root) {
    double least = INFINITY;
    std::ifstream file(groups_file);
    for (std::string line; std::getline(file, line);) {  // hierarchy:controllers:path
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        std::string controllers = line.substr(first, second - first + 1);  // with a colon at each end
        std::replace(controllers.begin(), controllers.end(), ':', ',');
        const std::string group = line.substr(second + 1);
        if (controllers == ",,") {
            least = std::min(least, tightest(root, group, quota_v2));
            least = std::min(least, tightest(root + "/unified", group, quota_v2));
        } else if (controllers.find(",cpu,") != std::string::npos) {
            least = std::min(least, tightest(root + "/cpu", group, quota_v1));
            least = std::min(least, tightest(root + "/cpu,cpuacct", group, quota_v1));
        }
    }
    if (!(least < 1e6)) return 0;
    return std::max(1, int(std::floor(least)));
}

int available_threads() {
    const int affinity = affinity_cpus(), quota = cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup");
    return quota > 0 ? std::min(affinity, quota) : affinity;
}

#ifdef OCTAVO_X86_LEVELS
namespace {

// Whether the processor has AMX tiles and their bfloat16 products, and the system saves the tiles and lets this process use them.
bool tiles_permitted() {
#if defined(OCTAVO_SIMDE)
    return true;  // emulated: a test build runs them anywhere
#elif defined(__linux__) && defined(SYS_arch_prctl)
    constexpr unsigned kOsxsave = 1u << 27, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // CPUID 1.ECX, 7.0.EDX
    constexpr unsigned kTileState = 3u << 17;                                          // XCR0: XTILECFG, XTILEDATA
    constexpr int kRequestPermission = 0x1023, kTileData = 18;                         // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsxsave)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
    unsigned low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    // The permission is the process's: threads made later have it, and so does a fork.
    return (low & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

bool tiles_work() {
    static const bool work = tiles_permitted() && kAmxPromptKernels.self_test();
    return work;
}

// Level "amx": all of "avx512vnni", and tiles for prompt rows.
const Kernels& amx_kernels() {
    static const Kernels kernels = [] {
        Kernels joined = kAvx512VnniKernels;
        joined.name = "amx";
        joined.prompt = kAmxPromptKernels;
        return joined;
    }();
    return kernels;
}

}  // namespace
#endif

std::vector<std::string> known_isa_levels() {
#ifdef OCTAVO_X86_LEVELS
    return {"portable", "avx2", "avx512vnni", "amx"};
#else
    return {"portable"};
#endif
}

std::vector<std::string> isa_levels() {
    std::vector<std::string> levels{"portable"};
#ifdef OCTAVO_X86_LEVELS
    __builtin_cpu_init();
    // GCC's and Clang's answers for AVX and AVX-512 include the operating system's XSAVE state.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        levels.push_back("avx2");
#ifdef OCTAVO_SIMDE
        levels.push_back("avx512vnni");  // emulated: a test build runs it anywhere
#else
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
            levels.push_back("avx512vnni");
#endif
        if (levels.back() == "avx512vnni" && tiles_work()) levels.push_back("amx");
    }
#endif
    return levels;
}

const Kernels& kernels_for(const std::string& level) {
    const std::vector<std::string> levels = isa_levels();
    std::string wanted = level, source = "isa";
    if (wanted.empty()) {
        const char* forced = std::getenv("OCTAVO_CPU_ISA");
        if (forced && *forced) { wanted = forced; source = "OCTAVO_CPU_ISA"; }
        // The strongest that has run on real hardware: amx has not, and is for those who ask for it.
        else wanted = levels.size() > 1 && levels.back() == "amx" ? levels[levels.size() - 2] : levels.back();
    }
    if (std::find(levels.begin(), levels.end(), wanted) == levels.end()) {
        std::string list;
        for (const std::string& name : levels) list += (list.empty() ? "" : ", ") + name;
        throw std::invalid_argument(source + "=" + wanted + " cannot run on this machine; choose one of: " + list);
    }
#ifdef OCTAVO_X86_LEVELS
    if (wanted == "amx") return amx_kernels();
    if (wanted == "avx512vnni") return kAvx512VnniKernels;
    if (wanted == "avx2") return kAvx2Kernels;
#endif
    return kPortableKernels;
}

}  // namespace octavo
