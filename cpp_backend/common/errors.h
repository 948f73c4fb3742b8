// The typed errors of the backend, which Python gets as those of tagi_ddp.communicators.errors.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tagi_ddp {

enum class ErrorKind : int { general, timeout, peer_lost, mismatch, unavailable };

class CommunicatorError : public std::runtime_error {
 public:
    CommunicatorError(ErrorKind kind, const std::string& text, std::vector<int> ranks = {})
        : std::runtime_error(text), kind_(kind), ranks_(std::move(ranks)) {}

    ErrorKind kind() const { return kind_; }
    // The ranks at fault: missing, lost or different.
    const std::vector<int>& ranks() const { return ranks_; }

 private:
    ErrorKind kind_;
    std::vector<int> ranks_;
};

}  // namespace tagi_ddp
