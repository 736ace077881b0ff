#include "memory.h"

#include <sys/mman.h>

#include <utility>

namespace octavo {

namespace {
constexpr size_t kHugePage = size_t(2) << 20;
}

int64_t checked_product(int64_t a, int64_t b, const char* what) {
    int64_t product;
    if (__builtin_mul_overflow(a, b, &product) || product >= (int64_t(1) << 62))
        throw OutOfMemory(std::string(what) + " is too large to address");
    return product;
}

Memory::Memory(int64_t bytes, const char* what) : size_(bytes) {
    // Large mappings start on a huge page: fewer TLB misses while weights stream through.
    const bool large = bytes >= int64_t(2 * kHugePage);
    mapped_ = size_t(bytes > 0 ? bytes : 1) + (large ? kHugePage : 0);
    mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping_ == MAP_FAILED) {
        mapping_ = nullptr;
        throw OutOfMemory("cannot reserve " + std::to_string(bytes >> 20) + " MiB for " + what);
    }
    data_ = static_cast<uint8_t*>(mapping_);
    if (large) {
        data_ += (kHugePage - reinterpret_cast<uintptr_t>(data_) % kHugePage) % kHugePage;
#ifdef MADV_HUGEPAGE
        madvise(data_, size_t(bytes), MADV_HUGEPAGE);  // a wish; failure changes speed only
#endif
    }
}

Memory::~Memory() {
    if (mapping_) munmap(mapping_, mapped_);
}

Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

}  // namespace octavo
