// A counter in shared memory, on which processes can sleep.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace tagi_ddp {

// Only one rank advances it, modulo 2^32. It fills a cache line, which prevents false sharing.
struct alignas(64) Counter {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    bool reached(uint32_t target) const {
        return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
    }

    // Sequentially consistent, as `sleep` is: the sleeper sees the value, or this sees the sleeper.
    void advance(uint32_t target) {
        value.store(target, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst) != 0) {
            syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
        }
    }

    // Sleeps until the counter reaches `target`, for at most `limit`; may return early.
    void sleep(uint32_t target, std::chrono::nanoseconds limit) {
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = value.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(seen - target) < 0) {
            timespec time{};
            time.tv_sec = static_cast<time_t>(limit.count() / 1000000000);
            time.tv_nsec = static_cast<long>(limit.count() % 1000000000);
            syscall(SYS_futex, &value, FUTEX_WAIT, seen, &time, nullptr, 0);
        }
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "counters are shared between processes");

}  // namespace tagi_ddp
