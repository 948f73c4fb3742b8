// The memory that the ranks of one host share, and the detection of ranks that have died.
//
// The memory is an unnamed file (memfd), so nothing has to be removed, however the ranks end. It is
// sparse: a page takes memory once it is written. Each rank locks one byte of it during the
// rendezvous, and the kernel releases the lock when the process ends in any way.
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

constexpr size_t slot_bytes = 128 * 1024;   // of a chunk; several fit into the second-level cache
constexpr uint32_t num_slots = 4;           // how far a rank may be ahead of the slowest, in chunks
constexpr size_t packet_bytes = 64 * 1024;  // of a chunk of a message between two ranks
constexpr uint32_t num_packets = 4;

struct RankState {
    std::atomic<bool> closed{false};
    Counter entered;    // operations that the rank has begun
    Counter published;  // chunks that it has written to its slots
    Counter consumed;   // rounds of chunks that it has read
    Signature signatures[2];
};

// The first failure of the group, written once.
struct Failure {
    std::atomic<uint32_t> state{0};  // 0: none, 1: being written, 2: complete
    uint32_t kind = 0;
    int32_t reporter = 0;
    uint32_t num_culprits = 0;
    int32_t culprits[64] = {};
    char text[1024] = {};
};

struct PacketHeader {
    uint64_t total_bytes;
    DType dtype;
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
    // Waits until all ranks have joined. Throws CommunicatorError.
    explicit Segment(const Rendezvous& rendezvous);
    ~Segment();

    RankState& rank(int r) const;
    Failure& failure() const;
    std::byte* slot(int r, uint32_t round) const;
    Channel& channel(int src, int dst) const;
    std::byte* packet(int src, int dst, uint32_t number) const;

    // True if a rank has closed its communicator, or its process exists.
    bool alive(int r) const;

    // Allocates symmetric memory, `bytes` for each rank; called by all ranks in the same order.
    // Throws std::bad_alloc if the host has too little memory.
    std::byte* allocate(size_t bytes);
    // A position in symmetric memory. The offset is equal on all ranks; the same position in the
    // memory of rank r is (r - rank) * stride bytes further.
    struct Location {
        uint64_t offset;
        std::ptrdiff_t stride;
    };
    // Empty if [data, data + bytes) is not in this rank's symmetric memory.
    std::optional<Location> find(const std::byte* data, size_t bytes) const;

 private:
    struct Allocation {
        size_t begin;   // the offset of rank 0's part in the segment
        size_t stride;  // between the parts of successive ranks
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
