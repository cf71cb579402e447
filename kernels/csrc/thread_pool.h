// Threads that share the chunks of one job at a time with the thread that called run().
//
// The caller never waits for a helper that holds no chunk: a helper that a neighbour keeps off its core costs its share of the
// work and nothing more. Idle helpers spin briefly (the next job of a step comes within microseconds), then sleep in a futex.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "common.h"

namespace fp {

class ThreadPool {
  public:
    static constexpr int kMaxThreads = 64;
    static constexpr int kMaxChunks = 32768;

    ThreadPool(int threads, int spin_us);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Threads that take chunks, the caller included. More are started as needed; fewer just leave helpers asleep.
    void set_threads(int threads);
    int threads() const { return active_.load(std::memory_order_relaxed); }

    // Calls body(chunk, thread) for every chunk in [0, num_chunks), each once, from threads numbered below threads().
    template <class Body>
    void run(int num_chunks, const Body& body) {
        auto call = [](const void* context, int chunk, int thread) {
            (*static_cast<const Body*>(context))(chunk, thread);
        };
        if (num_chunks == 1 || threads() == 1) {
            for (int chunk = 0; chunk < num_chunks; ++chunk) body(chunk, 0);
        } else if (num_chunks > 1) {
            run_shared(num_chunks, call, &body);
        }
    }

  private:
    using Call = void (*)(const void* context, int chunk, int thread);

    void run_shared(int num_chunks, Call call, const void* context);
    void take_chunks(int thread);
    void wait_done(int num_chunks);
    void help(int thread);
    bool wait_job(int thread, uint64_t* seen);
    void wake_helpers();

    // One word holds the job's number (32 bits), its chunks (16) and the next chunk (16), so that claiming a chunk proves
    // that the job is still the current one: a late helper can never take a chunk of a job that it has not seen.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::atomic<uint32_t> wake_{0};
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<uint32_t> caller_sleeps_{0};
    std::atomic<bool> quit_{false};
    std::atomic<int> active_{1};
    alignas(64) Call call_ = nullptr;
    const void* context_ = nullptr;
    int spin_us_;
    std::vector<std::thread> helpers_;
};

// In ceilings.cpp.
double read_bytes_per_second(ThreadPool& pool);
double int8_operations_per_second(ThreadPool& pool);

}  // namespace fp
