// When waiting ends, and how often a waiter looks around.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace tagi_ddp {

using Clock = std::chrono::steady_clock;

constexpr double forever = 3e9;  // seconds: a century, and does not overflow

// How often a waiter looks for signals and for peers that are gone.
constexpr std::chrono::milliseconds look_around{50};

inline Clock::time_point after(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::min(seconds, forever)));
}

// Adds the time for which it lives to `total`, in nanoseconds.
class Stopwatch {
 public:
    explicit Stopwatch(std::atomic<int64_t>& total) : total_(total) {}
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;
    ~Stopwatch() { total_ += std::chrono::nanoseconds(Clock::now() - begin_).count(); }

 private:
    std::atomic<int64_t>& total_;
    Clock::time_point begin_ = Clock::now();
};

}  // namespace tagi_ddp
