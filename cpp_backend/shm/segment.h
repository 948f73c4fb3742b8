// The memory that the ranks of one host share, and which of them are alive.
//
// A nameless file (memfd): nothing to remove, whatever happens to the ranks. It is sparse: a page
// costs memory once it is written. Each rank holds a lock on one byte of it before any rank is let
// in; the kernel drops it when the process ends in whatever way.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "shm/futex.h"
#include "shm/rendezvous.h"
#include "shm/signature.h"

namespace tagi_ddp {

constexpr size_t slot_bytes = 128 * 1024;   // a chunk: fits the second-level cache several times
constexpr uint32_t num_slots = 4;           // chunks a rank may be ahead of the slowest
constexpr size_t packet_bytes = 64 * 1024;  // a chunk of a message between two ranks
constexpr uint32_t num_packets = 4;

enum class RankStatus : uint32_t { open, closed };

struct RankState {
    std::atomic<RankStatus> status{RankStatus::open};
    Counter entered;    // operations begun
    Counter published;  // chunks ready in this rank's slots
    Counter consumed;   // rounds of chunks that this rank has read
    Signature signatures[2];
};

// The first failure of the group, written once.
struct Failure {
    std::atomic<uint32_t> state{0};  // 0 none, 1 being written, 2 there
    uint32_t kind = 0;
    int32_t reporter = 0;
    uint32_t num_culprits = 0;
    int32_t culprits[64] = {};
    char text[1024] = {};
};

struct PacketHeader {
    uint64_t total_bytes;
    uint32_t dtype;
    int32_t tag;
};

// Messages from one rank to another.
struct Channel {
    Counter sent;
    Counter received;
    alignas(64) PacketHeader headers[num_packets];
};

class Segment {
 public:
    // Waits for all ranks. Throws CommunicatorError.
    explicit Segment(const Rendezvous& rendezvous);
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();

    RankState& rank(int r) const;
    Failure& failure() const;
    std::byte* slot(int r, uint32_t round) const;
    Channel& channel(int src, int dst) const;
    std::byte* packet(int src, int dst, uint32_t number) const;

    // Whether a rank has closed, or its process still exists.
    bool alive(int r) const;

    // Symmetric memory: called by all ranks in the same order; `bytes` for each rank.
    // Throws std::bad_alloc when the host has none left.
    std::byte* allocate(size_t bytes);
    // Where something lies in symmetric memory: `offset` is equal on all ranks, rank r's
    // counterpart of an own address lies (r - rank) * stride further.
    struct Location {
        uint64_t offset;
        std::ptrdiff_t stride;
    };
    // Nothing when [data, data + bytes) is not this rank's symmetric memory.
    std::optional<Location> find(const std::byte* data, size_t bytes) const;

 private:
    struct Allocation {
        size_t begin;   // of rank 0's part, from the start of the segment
        size_t stride;  // from one rank's part to the next's
    };

    int rank_;
    int size_;
    size_t bytes_;
    FileDescriptor file_;
    std::byte* base_ = nullptr;
    size_t heap_next_;
    std::vector<Allocation> allocations_;
};

}  // namespace tagi_ddp
