// The times that the ranks take for their own work, between two exchanges.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/clock.h"

namespace tagi_ddp {

class Pace {
 public:
    // The nanoseconds since this rank's last exchange; 0 before the first.
    int64_t own() const {
        return since_ ? std::chrono::nanoseconds(Clock::now() - *since_).count() : 0;
    }

    // Adds the times of all ranks, which they have sent each other in an exchange.
    template <typename Times>
    void add(size_t ranks, const Times& time_of) {
        if (totals_.size() != ranks) {
            totals_.assign(ranks, 0);
            exchanges_ = 0;
        }
        for (size_t r = 0; r < ranks; ++r) totals_[r] += time_of(r);
        ++exchanges_;
    }

    // Ends an exchange: the next own work begins.
    void restart() { since_ = Clock::now(); }

    // The sums over all exchanges since the number of ranks changed.
    const std::vector<int64_t>& totals() const { return totals_; }
    int64_t exchanges() const { return exchanges_; }

 private:
    std::optional<Clock::time_point> since_;
    std::vector<int64_t> totals_;
    int64_t exchanges_ = 0;
};

}  // namespace tagi_ddp
