// Errors, aligned memory and the few constants that every file needs.
#pragma once
#include <sys/mman.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <new>
#include <utility>

#include "fp_api.h"

namespace fp {

constexpr int kBlock = 32;        // weights and activations that share a scale
constexpr int kPanel = 16;        // output columns that are packed side by side
constexpr int kPage = FP_PAGE_SIZE;
constexpr size_t kHugePage = size_t{2} << 20;

// What went wrong, as a status and a sentence. Thrown inside the library only; api.cpp turns it into the C form.
struct Failure {
    fp_status status;
    char text[FP_ERROR_BYTES];
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(fp_status status, const char* form, ...) {
    Failure failure{status, {}};
    va_list arguments;
    va_start(arguments, form);
    vsnprintf(failure.text, sizeof failure.text, form, arguments);
    va_end(arguments);
    throw failure;
}

// Memory straight from the system: aligned to a page, zero, in huge pages where it is large. Never resized.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t count) : count_(count), bytes_(count * sizeof(T)) {
        if (count == 0) return;
        if (bytes_ >= kHugePage) bytes_ = (bytes_ + kHugePage - 1) / kHugePage * kHugePage;
        void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        if (bytes_ >= kHugePage) madvise(memory, bytes_, MADV_HUGEPAGE);  // advice: a refusal costs speed only
        data_ = static_cast<T*>(memory);
    }
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (data_) munmap(data_, bytes_);
    }
    T* data() { return data_; }
    const T* data() const { return data_; }
    size_t size() const { return count_; }
    T& operator[](size_t index) { return data_[index]; }
    const T& operator[](size_t index) const { return data_[index]; }

  private:
    T* data_ = nullptr;
    size_t count_ = 0;
    size_t bytes_ = 0;
};

inline int ceil_div(int value, int by) { return (value + by - 1) / by; }

}  // namespace fp
