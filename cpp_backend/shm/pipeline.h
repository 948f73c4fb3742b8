// Chunks on their way through the ranks' slots.
//
// Each rank writes its chunks into its own slots, one after the other, and reads those of all. A
// slot is written again once all ranks have consumed the chunk in it, so a rank can be `num_slots`
// chunks ahead of the slowest. A round is chunk number k of all ranks; rounds are counted since the
// communicator began.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "shm/segment.h"

namespace tagi_ddp {

// What the ranks bring to a pipelined exchange.
struct PipelinedExchange {
    const char* name;              // for errors
    Signature signature;           // must fit on all ranks; `words` are free
    std::vector<uint32_t> chunks;  // of each rank: how many it publishes
    // Writes chunk number `chunk` of this rank into its slot.
    std::function<void(uint32_t chunk, std::byte* slot)> fill = nullptr;
    // Sees chunk number `chunk` of all ranks; null for a rank that has fewer.
    std::function<void(uint32_t chunk, const std::byte* const* slots)> consume = nullptr;
};

class Pipeline {
 public:
    // Returns when `counter`, which rank `peer` advances, has reached `target`, or throws.
    using Wait = std::function<void(Counter& counter, uint32_t target, int peer)>;

    // All ranks have had `round` rounds so far. The plan must outlive this.
    Pipeline(const Segment& segment, int rank, int size, uint32_t round,
             const PipelinedExchange& plan, Wait wait);

    // Publishes this rank's first chunk, if it has one.
    void publish_first();

    // Publishes and consumes all chunks; returns the number of rounds that all ranks have had then.
    uint32_t run();

 private:
    void publish();
    void publish_ahead(uint32_t chunk);
    const std::byte* const* read(uint32_t chunk);
    bool slot_free() const;
    void wait_for_slot() const;
    uint32_t rounds_to_free_slot() const;

    const Segment& segment_;
    RankState& self_;
    int rank_, size_;
    uint32_t own_chunks_;
    uint32_t round_;
    uint32_t published_ = 0;  // of this rank's chunks
    const PipelinedExchange& plan_;
    Wait wait_;
    std::vector<const std::byte*> slots_;
};

}  // namespace tagi_ddp
