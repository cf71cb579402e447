// What this machine can do at most, for the profile page: reading memory, and multiplying int8 numbers in registers.
#include <chrono>

#include "simd.h"
#include "thread_pool.h"

namespace fp {
namespace {

constexpr size_t kBytes = size_t{192} << 20;  // far beyond every cache
constexpr int kChunks = 64, kRepeats = 3;
constexpr int kSums = 8;
constexpr int64_t kRounds = 1 << 20;  // of a chunk

// Seconds of the fastest of a few runs of `body` over all chunks.
template <class Body>
double fastest(ThreadPool& pool, const Body& body) {
    double best = 1e9;
    for (int i = 0; i < kRepeats; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        pool.run(kChunks, body);
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
        best = passed.count() < best ? passed.count() : best;
    }
    return best;
}

}  // namespace

double read_bytes_per_second(ThreadPool& pool) {
    Buffer<uint8_t> memory(kBytes);
    for (size_t at = 0; at < kBytes; at += 4096) memory[at] = 1;  // a page that was never written is not memory
    constexpr size_t each = kBytes / kChunks;
    return kBytes / fastest(pool, [&](int chunk, int) {
        const auto* from = reinterpret_cast<const __m256i*>(memory.data() + chunk * each);
        __m256i sum[4] = {};
        for (size_t i = 0; i < each / 32; i += 4) {
            for (int k = 0; k < 4; ++k) sum[k] = _mm256_or_si256(sum[k], _mm256_load_si256(from + i + k));
        }
        for (const __m256i& value : sum) asm volatile("" ::"x"(value));
    });
}

// A multiplication and an addition count as two. With maddubs, as on a machine without VNNI.
double int8_operations_per_second(ThreadPool& pool) {
    const double operations = 2.0 * 32 * kSums * kRounds * kChunks;
    return operations / fastest(pool, [&](int chunk, int) {
        const __m256i left = _mm256_set1_epi8(3), right = _mm256_set1_epi8(static_cast<char>(chunk % 3));
        __m256i sum[kSums] = {};
        for (int64_t round = 0; round < kRounds; ++round) {
            repeat<kSums>([&](auto k) FP_INLINE {
                __m256i product = _mm256_maddubs_epi16(left, right);
                asm volatile("" : "+x"(product));
                sum[k] = _mm256_add_epi16(sum[k], product);
            });
        }
        for (const __m256i& value : sum) asm volatile("" ::"x"(value));
    });
}

}  // namespace fp
