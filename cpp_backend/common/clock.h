// When waiting ends, and how often a waiter looks around.
#pragma once

#include <algorithm>
#include <chrono>

namespace tagi_ddp {

using Clock = std::chrono::steady_clock;

constexpr double forever = 3e9;  // seconds: a century, and does not overflow

// How often a waiter looks for signals and for peers that are gone.
constexpr std::chrono::milliseconds look_around{50};

inline Clock::time_point after(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::min(seconds, forever)));
}

}  // namespace tagi_ddp
