// Deadlines, and the interval at which a waiting thread checks for signals and lost ranks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace tagi_ddp {

using Clock = std::chrono::steady_clock;

constexpr double forever = 3e9;  // seconds: a century, which does not overflow the clock

// The interval at which a waiting thread checks for signals and for ranks that have died.
constexpr std::chrono::milliseconds check_interval{50};

inline Clock::time_point after(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::min(seconds, forever)));
}

// Adds its lifetime to `total`, in nanoseconds.
class Stopwatch {
 public:
    explicit Stopwatch(std::atomic<int64_t>& total) : total_(total) {}
    Stopwatch(const Stopwatch&) = delete;
    ~Stopwatch() { total_ += std::chrono::nanoseconds(Clock::now() - begin_).count(); }

 private:
    std::atomic<int64_t>& total_;
    Clock::time_point begin_ = Clock::now();
};

}  // namespace tagi_ddp
