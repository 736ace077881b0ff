// Owned memory: page-mapped, zero until written, aligned to a cache line (and to huge pages where large).
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

namespace octavo {

// Becomes Python's MemoryError, with a message that says how much was asked for.
class OutOfMemory : public std::bad_alloc {
public:
    explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
    const char* what() const noexcept override { return message_.c_str(); }

private:
    std::string message_;
};

// a * b; OutOfMemory naming `what` when it does not fit in 62 bits. Operands must not be negative.
int64_t checked_product(int64_t a, int64_t b, const char* what);

// A private mapping. Reserved at once, given pages when they are touched, refused when the system will not promise it.
class Memory {
public:
    Memory() = default;
    Memory(int64_t bytes, const char* what);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint8_t* data() const { return data_; }
    int64_t size() const { return size_; }

private:
    void* mapping_ = nullptr;
    size_t mapped_ = 0;
    uint8_t* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace octavo
