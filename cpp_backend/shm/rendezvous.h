// The rendezvous of the ranks of one host. Rank 0 listens at a socket in the abstract namespace,
// which the kernel removes with its owner, and sends the descriptor of an unnamed memory file.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/errors.h"

namespace tagi_ddp {

// Owns a file descriptor.
class FileDescriptor {
 public:
    explicit FileDescriptor(int fd = -1) : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~FileDescriptor();

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

 private:
    int fd_;
};

// One rank of a group that is about to form.
struct Rendezvous {
    std::string job;      // for errors
    std::string version;  // of the package, the same on all ranks
    std::string backend;  // for errors
    std::string name;  // equal on all ranks, unique to the group; derived from the secret, if any
    int rank;
    int size;
    double timeout;
    std::function<void()> on_wait;  // called regularly while waiting; may throw
    Clock::time_point deadline = after(timeout);
};

// Throws an error of `init`.
[[noreturn]] void fail(const Rendezvous& rendezvous, ErrorKind kind, const std::string& text,
                       std::vector<int> ranks = {});

// Returns rank 0's memory file of `bytes` bytes on every rank, once all ranks have joined and each
// has returned from `claim(file)`, which from then on shows the others that the rank is alive.
// Throws CommunicatorError: Timeout naming the missing ranks, PeerLost naming a rank that has died
// since it joined, Mismatch if the ranks' arguments differ. Exceptions of `claim` pass through.
FileDescriptor share_memory(const Rendezvous& rendezvous, size_t bytes,
                            const std::function<void(int)>& claim);

}  // namespace tagi_ddp
