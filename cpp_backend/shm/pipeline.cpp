#include "shm/pipeline.h"

#include <algorithm>
#include <utility>

namespace tagi_ddp {

Pipeline::Pipeline(const Segment& segment, int rank, int size, uint32_t round,
                   const PipelinedExchange& plan, Wait wait)
    : segment_(segment),
      self_(segment.rank(rank)),
      rank_(rank),
      size_(size),
      own_chunks_(plan.chunks[static_cast<size_t>(rank)]),
      round_(round),
      plan_(plan),
      wait_(std::move(wait)),
      slots_(static_cast<size_t>(size)) {}

void Pipeline::publish_first() {
    if (own_chunks_ == 0) return;
    wait_for_slot();
    publish();
}

uint32_t Pipeline::run() {
    const uint32_t rounds = *std::max_element(plan_.chunks.begin(), plan_.chunks.end());
    for (uint32_t chunk = 0; chunk < rounds; ++chunk) {
        publish_ahead(chunk);
        plan_.consume(chunk, read(chunk));
        self_.consumed.advance(round_ + chunk + 1);
    }
    self_.published.advance(round_ + rounds);
    return round_ + rounds;
}

void Pipeline::publish() {
    plan_.fill(published_, segment_.slot(rank_, round_ + published_));
    self_.published.advance(round_ + ++published_);
}

// Publishes up to `chunk`, whatever it takes, and as many more as there are free slots.
void Pipeline::publish_ahead(uint32_t chunk) {
    while (published_ < own_chunks_ && published_ < chunk + num_slots) {
        if (!slot_free()) {
            if (published_ > chunk) return;
            wait_for_slot();
        }
        publish();
    }
}

// Waits for chunk number `chunk` of all ranks that have so many.
const std::byte* const* Pipeline::read(uint32_t chunk) {
    for (int r = 0; r < size_; ++r) {
        const size_t i = static_cast<size_t>(r);
        slots_[i] = nullptr;
        if (chunk >= plan_.chunks[i]) continue;
        if (r != rank_) wait_(segment_.rank(r).published, round_ + chunk + 1, r);
        slots_[i] = segment_.slot(r, round_ + chunk);
    }
    return slots_.data();
}

// How many rounds a rank has consumed when it is done with the slot of this rank's next chunk.
uint32_t Pipeline::rounds_to_free_slot() const { return round_ + published_ + 1 - num_slots; }

bool Pipeline::slot_free() const {
    for (int r = 0; r < size_; ++r) {
        if (!segment_.rank(r).consumed.reached(rounds_to_free_slot())) return false;
    }
    return true;
}

void Pipeline::wait_for_slot() const {
    for (int r = 0; r < size_; ++r) {
        if (r != rank_) wait_(segment_.rank(r).consumed, rounds_to_free_slot(), r);
    }
}

}  // namespace tagi_ddp
