// How the ranks of one host find each other: a socket in the abstract namespace, which the kernel
// removes with its owner, over which rank 0 hands out the descriptor of a nameless memory file.
#pragma once

#include <functional>
#include <string>

#include "common/clock.h"

namespace tagi_ddp {

// Owns a file descriptor.
class FileDescriptor {
 public:
    explicit FileDescriptor(int fd = -1) : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept;
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    ~FileDescriptor() { reset(); }

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    int release();
    void reset();

 private:
    int fd_;
};

// What a rank has to know to find the others.
struct Rendezvous {
    std::string job;   // what errors call it
    std::string name;  // equal on all ranks, different for every group; guarded by a key, if any
    int rank;
    int size;
    Clock::time_point deadline;
    std::function<void()> on_wait;  // called now and then while waiting; may throw
    std::string backend;            // what errors call it, too
};

// Returns rank 0's memory file of `bytes` bytes on every rank, once all ranks have come and each
// has returned from `claim(file)`, by which it shows the others that it is alive from then on.
// Throws CommunicatorError: Timeout naming the missing ranks, PeerLost naming one that has died
// since it came, Mismatch when ranks do not fit; and what `claim` throws.
FileDescriptor share_memory(const Rendezvous& rendezvous, size_t bytes,
                            const std::function<void(int)>& claim);

}  // namespace tagi_ddp
