#include "shm/shm_communicator.h"

#include <sched.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "shm/texts.h"

namespace tagi_ddp {
namespace {

// About 1 ms. Ranks that train in step arrive within that time, and a core wakes slowly from sleep:
// a training step of 3 ms took 4.7 ms with a twentieth of this.
constexpr int spins_with_core = 80000;
constexpr int spins_without_core = 50;  // with fewer cores than ranks, the others must run

// Makes the name of a subgroup's rendezvous unpredictable.
int64_t random_token() {
    int64_t token = 0;
    if (getrandom(&token, sizeof token, 0) != static_cast<ssize_t>(sizeof token))
        throw CommunicatorError(ErrorKind::unavailable,
                                "getrandom() failed. Choose another backend.");
    return token;
}

}  // namespace

ShmCommunicator::ShmCommunicator(int rank, int size, const std::string& job,
                                 const std::string& name, double timeout,
                                 std::function<void()> on_wait, bool spin,
                                 const std::string& backend, const std::string& version)
    : rank_(rank),
      size_(size),
      job_(job),
      backend_(backend),
      on_wait_(std::move(on_wait)),
      segment_(std::make_shared<Segment>(
          Rendezvous{job, version, backend, name, rank, size, timeout, on_wait_})),
      process_(getpid()),
      has_cores_(spin && static_cast<long>(size) <= sysconf(_SC_NPROCESSORS_ONLN)),
      spins_(has_cores_ ? spins_with_core : spins_without_core) {
    sent_.resize(static_cast<size_t>(size));
    received_.resize(static_cast<size_t>(size));
    const Operation operation = begin("init", timeout);
    guarded(operation, [&] { enter(operation, Signature{Kind::barrier}); });
}

ShmCommunicator::~ShmCommunicator() { close(); }

ShmCommunicator::Operation ShmCommunicator::begin_collective(Kind kind, double timeout) {
    Operation operation = begin(name_of(kind) + (" #" + std::to_string(++number_)), timeout);
    operation.is_collective = true;
    return operation;
}

ShmCommunicator::Operation ShmCommunicator::begin(const std::string& name, double timeout) {
    Operation operation{name, timeout, after(timeout)};
    require_open(operation);
    std::unique_lock<std::mutex> lock(broken_mutex_);
    if (broken_) {
        raise(operation, broken_->kind(),
              std::string("not started, this communicator failed before (") + broken_->what() +
                  "). Make a new one.",
              broken_->ranks());
    }
    lock.unlock();
    // If the others have failed, a late rank fails too, although it could still read their data.
    if (segment_->failure().state.load(std::memory_order_acquire) == 2) {
        guarded(operation, [&] { throw_failure(operation); });
    }
    return operation;
}

void ShmCommunicator::require_open(const Operation& operation) const {
    if (segment_) return;
    raise(operation, ErrorKind::general, "this communicator is closed. Make a new one.");
}

bool ShmCommunicator::failed() const {
    std::lock_guard<std::mutex> lock(broken_mutex_);
    return broken_.has_value();
}

bool ShmCommunicator::in_own_process() const { return getpid() == process_; }

void ShmCommunicator::require_own_process() const {
    if (in_own_process()) return;
    throw CommunicatorError(ErrorKind::general, "rank " + std::to_string(rank_) + " of " +
                                                    std::to_string(size_) + " (" + backend_ +
                                                    "): this communicator is that of process " +
                                                    std::to_string(process_) +
                                                    ", of which this is a fork. Make a new one.");
}

std::string ShmCommunicator::where(const Operation& operation) const {
    return where_text(operation.name, rank_, size_, backend_);
}

void ShmCommunicator::raise(const Operation& operation, ErrorKind kind, const std::string& text,
                            std::vector<int> ranks) const {
    throw CommunicatorError(kind, where(operation) + text, std::move(ranks));
}

void ShmCommunicator::guarded(const Operation& operation, const std::function<void()>& body) {
    try {
        body();
    } catch (const CommunicatorError& error) {
        fail(error, where(operation));
        throw;
    } catch (...) {
        // `on_wait` has interrupted the operation, for which the others must not wait.
        const std::string text = "rank " + std::to_string(rank_) + " gave up: it was interrupted.";
        fail({ErrorKind::peer_lost, where(operation) + text, {rank_}}, where(operation));
        throw;
    }
}

void ShmCommunicator::fail(const CommunicatorError& error, const std::string& where) {
    std::lock_guard<std::mutex> lock(broken_mutex_);
    if (broken_) return;
    broken_ = error;
    Failure& failure = segment_->failure();
    uint32_t none = 0;
    if (!failure.state.compare_exchange_strong(none, 1)) return;
    failure.kind = static_cast<uint32_t>(error.kind());
    failure.reporter = rank_;
    failure.num_culprits = 0;
    for (int culprit : error.ranks()) {
        if (failure.num_culprits == std::size(failure.culprits)) break;
        failure.culprits[failure.num_culprits++] = culprit;
    }
    std::string text = error.what();
    if (text.compare(0, where.size(), where) == 0) text.erase(0, where.size());
    std::strncpy(failure.text, text.c_str(), sizeof failure.text - 1);
    failure.state.store(2, std::memory_order_release);
}

void ShmCommunicator::throw_failure(const Operation& operation) const {
    const Failure& failure = segment_->failure();
    std::vector<int> culprits(failure.culprits, failure.culprits + failure.num_culprits);
    const auto kind = static_cast<ErrorKind>(failure.kind);
    const auto blamed = [&](int rank) {
        return std::find(culprits.begin(), culprits.end(), rank) != culprits.end();
    };
    // Name the reporter if it or this rank is to blame, or if the text may contain "this rank".
    const bool passed_on = (kind == ErrorKind::peer_lost || kind == ErrorKind::timeout) &&
                           !blamed(rank_) && !blamed(failure.reporter);
    const std::string own = "rank " + std::to_string(failure.reporter) + " gave up: ";
    std::string text = failure.text;
    if (!passed_on && text.compare(0, own.size(), own) != 0) text = own + text;
    if (failure.reporter != rank_ && blamed(rank_)) {
        raise(operation, kind == ErrorKind::mismatch ? kind : ErrorKind::peer_lost, text,
              {failure.reporter});
    }
    raise(operation, kind, text, culprits);
}

void ShmCommunicator::check_peers(const Operation& operation, int peer) const {
    if (on_wait_) on_wait_();
    if (segment_->failure().state.load(std::memory_order_acquire) == 2) throw_failure(operation);
    std::vector<int> dead;
    for (int r = 0; r < size_; ++r) {
        if (r != rank_ && !segment_->alive(r)) dead.push_back(r);
    }
    if (!dead.empty()) raise(operation, ErrorKind::peer_lost, died_text(dead), dead);
    if (segment_->rank(peer).closed.load(std::memory_order_acquire)) {
        raise(operation, ErrorKind::peer_lost, closed_text(peer), {peer});
    }
}

void ShmCommunicator::time_out(const Operation& operation, int peer) const {
    // Blame the ranks that have not entered; if all have, those that have consumed the fewest
    // chunks, for which the others wait.
    std::vector<int> missing;
    std::string last;  // the last call of those ranks
    if (operation.is_collective) {
        const uint32_t own = segment_->rank(rank_).consumed.value;
        int32_t fewest = 0;
        for (int r = 0; r < size_; ++r) {
            if (!segment_->rank(r).entered.reached(entries_)) missing.push_back(r);
            fewest = std::min(fewest, static_cast<int32_t>(segment_->rank(r).consumed.value - own));
        }
        const uint32_t entry = missing.empty() ? entries_ : entries_ - 1;
        const Kind kind = segment_->rank(rank_).signatures[entry % 2].kind;
        last = entry == 1 ? "init" : name_of(kind) + (" #" + std::to_string(entry - 1));
        for (int r = 0; missing.empty() && fewest < 0 && r < size_; ++r) {
            const uint32_t consumed = segment_->rank(r).consumed.value;
            if (static_cast<int32_t>(consumed - own) == fewest) missing.push_back(r);
        }
    }
    if (missing.empty()) missing.push_back(peer);
    raise(operation, ErrorKind::timeout, timeout_text(missing, operation.timeout, last), missing);
}

void ShmCommunicator::wait(const Operation& operation, Counter& counter, uint32_t target,
                           int peer) {
    if (counter.reached(target)) return;
    const Stopwatch stopwatch(waited_);
    for (int i = 0; i < spins_; ++i) {
        if (counter.reached(target)) return;
        if (has_cores_) {  // a yield could keep two ranks on one core
            __builtin_ia32_pause();
        } else {
            sched_yield();
        }
    }
    while (!counter.reached(target)) {
        const auto left = operation.deadline - Clock::now();
        if (left <= Clock::duration::zero()) time_out(operation, peer);
        counter.sleep(target, std::min<std::chrono::nanoseconds>(left, check_interval));
        if (counter.reached(target)) return;
        check_peers(operation, peer);
    }
}

std::vector<Signature> ShmCommunicator::enter(const Operation& operation, const Signature& own) {
    ++entries_;
    RankState& self = segment_->rank(rank_);
    self.signatures[entries_ % 2] = own;
    self.signatures[entries_ % 2].purpose = purpose_;
    self.entered.advance(entries_);
    std::vector<Signature> all(static_cast<size_t>(size_));
    std::vector<int> different;
    for (int r = 0; r < size_; ++r) {
        RankState& other = segment_->rank(r);
        if (r != rank_) wait(operation, other.entered, entries_, r);
        const Signature& theirs = all[static_cast<size_t>(r)] = other.signatures[entries_ % 2];
        if (!theirs.fits(self.signatures[entries_ % 2])) different.push_back(r);
    }
    if (!different.empty()) {
        raise(operation, ErrorKind::mismatch, mismatch_text(different, all, own), different);
    }
    return all;
}

void ShmCommunicator::exchange(const PipelinedExchange& plan, double timeout) {
    exchange(begin_collective(plan.signature.kind, timeout), plan);
}

void ShmCommunicator::exchange(const InPlaceExchange& plan, double timeout) {
    const Operation operation = begin_collective(plan.signature.kind, timeout);
    guarded(operation, [&] {
        const auto location = segment_->find(plan.own.byte_data(), plan.own.bytes());
        if (!location) {
            throw std::invalid_argument(where(operation) +
                                        "the buffer is not in the communicator's own memory. "
                                        "Pass one that its empty() has returned.");
        }
        Signature signature = plan.signature;
        signature.detail += location->offset;
        const std::vector<Signature> all = enter(operation, signature);
        if (plan.agree && !plan.agree(all)) return;
        std::vector<std::byte*> parts;
        for (int r = 0; r < size_; ++r) {
            parts.push_back(plan.own.byte_data() + location->stride * (r - rank_));
        }
        for (const auto& phase : plan.phases) {
            phase(parts);
            ++round_;
            segment_->rank(rank_).published.advance(round_);
            segment_->rank(rank_).consumed.advance(round_);
            for (int r = 0; r < size_; ++r) {
                if (r != rank_) wait(operation, segment_->rank(r).consumed, round_, r);
            }
        }
    });
}

void ShmCommunicator::exchange(const Operation& operation, const PipelinedExchange& plan) {
    RankState& self = segment_->rank(rank_);
    const uint32_t own_chunks = plan.chunks[static_cast<size_t>(rank_)];
    uint32_t published = 0;  // this rank's chunks so far
    // A rank that has consumed this number of rounds no longer needs the slot of the next chunk.
    const auto rounds_to_free_slot = [&] { return round_ + published + 1 - num_slots; };
    const auto slot_is_free = [&] {
        for (int r = 0; r < size_; ++r) {
            if (!segment_->rank(r).consumed.reached(rounds_to_free_slot())) return false;
        }
        return true;
    };
    const auto wait_for_slot = [&] {
        for (int r = 0; r < size_; ++r) {
            if (r != rank_) wait(operation, segment_->rank(r).consumed, rounds_to_free_slot(), r);
        }
    };
    const auto publish = [&] {
        plan.fill(published, segment_->slot(rank_, round_ + published));
        self.published.advance(round_ + ++published);
    };
    // Publishes chunks up to number `chunk`, and more while slots are free.
    const auto publish_ahead = [&](uint32_t chunk) {
        while (published < own_chunks && published < chunk + num_slots) {
            if (!slot_is_free()) {
                if (published > chunk) return;
                wait_for_slot();
            }
            publish();
        }
    };
    guarded(operation, [&] {
        if (own_chunks != 0) {  // before the signature, so a small exchange waits only once
            wait_for_slot();
            publish();
        }
        enter(operation, plan.signature);
        const uint32_t rounds = *std::max_element(plan.chunks.begin(), plan.chunks.end());
        std::vector<const std::byte*> slots(static_cast<size_t>(size_));
        for (uint32_t chunk = 0; chunk < rounds; ++chunk) {
            publish_ahead(chunk);
            for (int r = 0; r < size_; ++r) {
                const size_t i = static_cast<size_t>(r);
                slots[i] = nullptr;
                if (chunk >= plan.chunks[i]) continue;
                if (r != rank_) wait(operation, segment_->rank(r).published, round_ + chunk + 1, r);
                slots[i] = segment_->slot(r, round_ + chunk);
            }
            plan.consume(chunk, slots.data());
            self.consumed.advance(round_ + chunk + 1);
        }
        round_ += rounds;
        self.published.advance(round_);
    });
}

std::unique_ptr<ShmCommunicator> ShmCommunicator::split(int color, int key, double timeout) {
    const Operation operation = begin_collective(Kind::split, timeout);
    std::unique_ptr<ShmCommunicator> part;
    guarded(operation, [&] {
        Signature signature{Kind::split};
        signature.values[0] = color;
        signature.values[1] = key;
        signature.values[2] = random_token();
        const std::vector<Signature> all = enter(operation, signature);
        const std::string job =
            job_ + "/split" + std::to_string(splits_++) + "." + std::to_string(color);
        if (color < 0) return;
        std::vector<int> members;
        for (int r = 0; r < size_; ++r) {
            if (all[static_cast<size_t>(r)].values[0] == color) members.push_back(r);
        }
        const auto key = [&](int rank) {
            return std::make_pair(all[static_cast<size_t>(rank)].values[1], rank);
        };
        std::sort(members.begin(), members.end(), [&](int a, int b) { return key(a) < key(b); });
        const auto self = std::find(members.begin(), members.end(), rank_);
        const int64_t token = all[static_cast<size_t>(members.front())].values[2];
        part = std::make_unique<ShmCommunicator>(
            static_cast<int>(self - members.begin()), static_cast<int>(members.size()), job,
            std::to_string(token), timeout, [&] { check_peers(operation, rank_); }, true, backend_);
        part->on_wait_ = on_wait_;
    });
    return part;
}

std::shared_ptr<std::byte> ShmCommunicator::allocate(size_t bytes, double timeout) {
    const Operation operation = begin_collective(Kind::allocate, timeout);
    Signature signature{Kind::allocate};
    signature.count = bytes;
    std::byte* memory = nullptr;
    guarded(operation, [&] {
        enter(operation, signature);
        memory = segment_->allocate(bytes);
    });
    return {segment_, memory};
}

void ShmCommunicator::abort(const std::string& reason, std::vector<int> ranks) {
    if (!segment_ || !in_own_process()) return;
    if (ranks.empty()) ranks = {rank_};
    const std::string text = "rank " + std::to_string(rank_) + " gave up: " + reason;
    fail({ErrorKind::peer_lost, text, std::move(ranks)}, "");
}

void ShmCommunicator::check() const {
    const Operation operation{"check", 0, after(0)};
    require_open(operation);
    for (int r = 0; r < size_; ++r) check_peers(operation, r);
}

void ShmCommunicator::close() {
    if (!segment_) return;
    if (in_own_process()) {
        segment_->rank(rank_).closed.store(true, std::memory_order_release);
    }
    segment_.reset();
}

}  // namespace tagi_ddp
