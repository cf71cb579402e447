#include "thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

namespace fp {
namespace {

constexpr int kPausesPerLook = 16;

uint64_t job_of(uint64_t ticket) { return ticket >> 32; }
uint32_t chunks_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 16) & 0xffff; }
uint32_t next_of(uint64_t ticket) { return static_cast<uint32_t>(ticket) & 0xffff; }
bool has_chunk(uint64_t ticket) { return next_of(ticket) < chunks_of(ticket); }

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// Spins until `ready` holds or the time is over; true if it holds.
template <class Ready>
bool spin(int spin_us, const Ready& ready) {
    if (ready()) return true;
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
    do {
        for (int pause = 0; pause < kPausesPerLook; ++pause) {
            _mm_pause();
            if (ready()) return true;
        }
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

}  // namespace

ThreadPool::ThreadPool(int threads, int spin_us) : spin_us_(spin_us) { set_threads(threads); }

ThreadPool::~ThreadPool() {
    quit_.store(true);
    wake_helpers();
    for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::set_threads(int threads) {
    helpers_.reserve(threads);
    while (static_cast<int>(helpers_.size()) < threads - 1) {
        const int number = static_cast<int>(helpers_.size()) + 1;
        helpers_.emplace_back([this, number] { help(number); });
    }
    active_.store(threads);
}

void ThreadPool::run_shared(int num_chunks, Call call, const void* context) {
    if (num_chunks > kMaxChunks) fail(FP_INTERNAL, "a job has %d chunks, limit %d", num_chunks, kMaxChunks);
    call_ = call;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = job_of(ticket_.load(std::memory_order_relaxed)) + 1;
    // Sequentially consistent, as the load below and the helper's own pair: a helper sees the job or is counted as asleep.
    ticket_.store(job << 32 | static_cast<uint64_t>(num_chunks) << 16);
    if (sleepers_.load() != 0) wake_helpers();
    take_chunks(0);
    wait_done(num_chunks);
}

void ThreadPool::take_chunks(int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (has_chunk(ticket)) {
        if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        call_(context_, static_cast<int>(next_of(ticket)), thread);
        const uint32_t done = done_.fetch_add(1) + 1;
        if (done == chunks_of(ticket) && caller_sleeps_.load() != 0) futex_wake(done_);
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

void ThreadPool::wait_done(int num_chunks) {
    const uint32_t all = static_cast<uint32_t>(num_chunks);
    if (spin(spin_us_, [&] { return done_.load(std::memory_order_acquire) == all; })) return;
    caller_sleeps_.store(1);
    for (uint32_t done = done_.load(); done != all; done = done_.load()) futex_wait(done_, done);
    caller_sleeps_.store(0);
}

void ThreadPool::help(int thread) {
    uint64_t seen = 0;
    while (wait_job(thread, &seen)) take_chunks(thread);
}

// Returns when there is a job that this helper has not seen, or false to end.
bool ThreadPool::wait_job(int thread, uint64_t* seen) {
    const auto is_called = [&] {
        const uint64_t job = job_of(ticket_.load());
        return quit_.load() || (job != *seen && thread < active_.load());
    };
    while (!spin(spin_us_, is_called)) {
        const uint32_t wake = wake_.load();
        sleepers_.fetch_add(1);
        if (!is_called()) futex_wait(wake_, wake);
        sleepers_.fetch_sub(1);
    }
    *seen = job_of(ticket_.load());
    return !quit_.load();
}

void ThreadPool::wake_helpers() {
    wake_.fetch_add(1);
    futex_wake(wake_);
}

}  // namespace fp
