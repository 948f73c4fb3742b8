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

using std::chrono::nanoseconds;

// About 1 ms: peers that train in step come by then, and a core that sleeps wakes slowly; a
// training step of 3 ms took 4.7 ms with a twentieth of this.
constexpr int spins_with_core = 80000;
constexpr int spins_without_core = 50;  // more ranks than cores: let the others run

// Nobody can foretell the name of a group that a group makes.
int64_t random_token() {
    int64_t token = 0;
    if (getrandom(&token, sizeof token, 0) != static_cast<ssize_t>(sizeof token))
        throw CommunicatorError(ErrorKind::unavailable,
                                "the system gave no random number. Choose another backend.");
    return token;
}

}  // namespace

ShmCommunicator::ShmCommunicator(int rank, int size, const std::string& job,
                                 const std::string& name, double timeout,
                                 std::function<void()> on_wait, bool spin,
                                 const std::string& backend)
    : rank_(rank),
      size_(size),
      job_(job),
      backend_(backend),
      timeout_(timeout),
      on_wait_(std::move(on_wait)),
      segment_(std::make_shared<Segment>(
          Rendezvous{job, name, rank, size, after(timeout), on_wait_, backend})),
      process_(getpid()),
      has_cores_(spin && static_cast<long>(size) <= sysconf(_SC_NPROCESSORS_ONLN)),
      spins_(has_cores_ ? spins_with_core : spins_without_core) {
    const size_t n = static_cast<size_t>(size);
    packets_sent_.resize(n);
    packets_received_.resize(n);
    messages_sent_.resize(n);
    messages_received_.resize(n);
    const Operation operation = begin("init", timeout);
    guarded(operation, [&] { enter(operation, Signature{Kind::barrier}); });
}

ShmCommunicator::~ShmCommunicator() { close(); }

// --- waiting ------------------------------------------------------------------------------------

ShmCommunicator::Operation ShmCommunicator::begin_collective(const char* name, double timeout) {
    Operation operation = begin(std::string(name) + " #" + std::to_string(++number_), timeout);
    operation.of_all = true;
    return operation;
}

ShmCommunicator::Operation ShmCommunicator::begin(const std::string& name, double timeout) {
    Operation operation{name, timeout, after(timeout)};
    require_open(operation);
    std::unique_lock<std::mutex> lock(broken_mutex_);
    if (broken_) {
        throw CommunicatorError(broken_->kind(),
                                where(operation) +
                                    "not started, this communicator failed before (" +
                                    broken_->what() + "). Make a new one.",
                                broken_->ranks());
    }
    lock.unlock();
    // A late rank learns that the others have given up, even if all they wrote is still there.
    if (segment_->failure().state.load(std::memory_order_acquire) == 2) {
        guarded(operation, [&] { throw_failure(operation); });
    }
    return operation;
}

void ShmCommunicator::require_open(const Operation& operation) const {
    if (segment_) return;
    throw CommunicatorError(ErrorKind::general,
                            where(operation) + "this communicator is closed. Make a new one.");
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

void ShmCommunicator::guarded(const Operation& operation, const std::function<void()>& body) {
    try {
        body();
    } catch (const CommunicatorError& error) {
        fail(error, where(operation));
        throw;
    } catch (...) {
        // Interrupted from outside: the others must not wait for the rest of this operation.
        const std::string text = "rank " + std::to_string(rank_) + " gave up: it was interrupted.";
        fail({ErrorKind::peer_lost, where(operation) + text, {rank_}}, where(operation));
        throw;
    }
}

void ShmCommunicator::fail(const CommunicatorError& error, const std::string& where) {
    std::lock_guard<std::mutex> lock(broken_mutex_);
    if (broken_) return;
    broken_ = error;
    record_failure(error, where);
}

void ShmCommunicator::record_failure(const CommunicatorError& error, const std::string& where) {
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
    // Who told of it counts where that one or this rank is to blame, or where it says "this rank".
    const bool passed_on = (kind == ErrorKind::peer_lost || kind == ErrorKind::timeout) &&
                           !blamed(rank_) && !blamed(failure.reporter);
    const std::string own = "rank " + std::to_string(failure.reporter) + " gave up: ";
    std::string text = failure.text;
    if (!passed_on && text.compare(0, own.size(), own) != 0) text = own + text;
    if (failure.reporter != rank_ && blamed(rank_)) {
        throw CommunicatorError(kind == ErrorKind::mismatch ? kind : ErrorKind::peer_lost,
                                where(operation) + text, {failure.reporter});
    }
    throw CommunicatorError(kind, where(operation) + text, culprits);
}

void ShmCommunicator::check_peers(const Operation& operation, int peer) const {
    if (on_wait_) on_wait_();
    if (segment_->failure().state.load(std::memory_order_acquire) == 2) throw_failure(operation);
    std::vector<int> dead;
    for (int r = 0; r < size_; ++r) {
        if (r != rank_ && !segment_->alive(r)) dead.push_back(r);
    }
    if (!dead.empty()) {
        throw CommunicatorError(ErrorKind::peer_lost, where(operation) + died_text(dead), dead);
    }
    if (segment_->rank(peer).status.load(std::memory_order_acquire) == RankStatus::closed) {
        throw CommunicatorError(ErrorKind::peer_lost, where(operation) + closed_text(peer), {peer});
    }
}

void ShmCommunicator::time_out(const Operation& operation, int peer) const {
    // Missing are the ranks that have not begun, or else those that hold up the chunks of all: that
    // have consumed the fewest.
    std::vector<int> missing;
    if (operation.of_all) {
        const uint32_t own = segment_->rank(rank_).consumed.value;
        int32_t fewest = 0;
        for (int r = 0; r < size_; ++r) {
            if (!segment_->rank(r).entered.reached(entries_)) missing.push_back(r);
            fewest = std::min(fewest, static_cast<int32_t>(segment_->rank(r).consumed.value - own));
        }
        for (int r = 0; missing.empty() && fewest < 0 && r < size_; ++r) {
            const uint32_t consumed = segment_->rank(r).consumed.value;
            if (static_cast<int32_t>(consumed - own) == fewest) missing.push_back(r);
        }
    }
    if (missing.empty()) missing.push_back(peer);
    throw CommunicatorError(ErrorKind::timeout,
                            where(operation) + timeout_text(missing, operation.timeout), missing);
}

void ShmCommunicator::wait(const Operation& operation, Counter& counter, uint32_t target,
                           int peer) {
    if (counter.reached(target)) return;
    const Stopwatch stopwatch(waited_);
    for (int i = 0; i < spins_; ++i) {
        if (counter.reached(target)) return;
        if (has_cores_) {
            relax();  // if they yielded, two ranks could stay on one core though another is free
        } else {
            sched_yield();
        }
    }
    while (!counter.reached(target)) {
        const auto left = operation.deadline - Clock::now();
        if (left <= Clock::duration::zero()) time_out(operation, peer);
        counter.sleep(target, std::min<nanoseconds>(left, look_around));
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
    std::vector<std::pair<int, std::string>> calls;
    for (int r = 0; r < size_; ++r) {
        RankState& other = segment_->rank(r);
        if (r != rank_) wait(operation, other.entered, entries_, r);
        const Signature& theirs = all[static_cast<size_t>(r)] = other.signatures[entries_ % 2];
        if (!theirs.fits(self.signatures[entries_ % 2])) {
            different.push_back(r);
            calls.emplace_back(r, name_call(theirs));
        }
    }
    if (!different.empty()) {
        throw CommunicatorError(ErrorKind::mismatch,
                                where(operation) + mismatch_text(calls, name_call(own)), different);
    }
    return all;
}

// --- chunks -------------------------------------------------------------------------------------

void ShmCommunicator::exchange(const PipelinedExchange& plan, double timeout) {
    exchange(begin_collective(plan.name, timeout), plan);
}

void ShmCommunicator::exchange(const InPlaceExchange& plan, double timeout) {
    const Operation operation = begin_collective(plan.name, timeout);
    guarded(operation, [&] {
        const auto location = segment_->find(plan.own.byte_data(), plan.own.bytes());
        if (!location) {
            throw std::invalid_argument(where(operation) +
                                        "the buffer is not of the communicator's own memory");
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
    guarded(operation, [&] {
        Pipeline pipeline(*segment_, rank_, size_, round_, plan,
                          [&](Counter& counter, uint32_t target, int peer) {
                              wait(operation, counter, target, peer);
                          });
        pipeline.publish_first();  // it goes with the signature: a small exchange waits once
        enter(operation, plan.signature);
        round_ = pipeline.run();
    });
}

// --- groups and the end -------------------------------------------------------------------------

std::unique_ptr<ShmCommunicator> ShmCommunicator::split(int color, int key, double timeout) {
    const Operation operation = begin_collective("split", timeout);
    std::unique_ptr<ShmCommunicator> part;
    guarded(operation, [&] {
        Signature signature{Kind::split};
        signature.words[0] = color;
        signature.words[1] = key;
        signature.words[2] = random_token();
        const std::vector<Signature> all = enter(operation, signature);
        const std::string job =
            job_ + "/split" + std::to_string(splits_++) + "." + std::to_string(color);
        if (color < 0) return;
        std::vector<int> members;
        for (int r = 0; r < size_; ++r) {
            if (all[static_cast<size_t>(r)].words[0] == color) members.push_back(r);
        }
        std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
            return all[static_cast<size_t>(a)].words[1] < all[static_cast<size_t>(b)].words[1];
        });
        const auto self = std::find(members.begin(), members.end(), rank_);
        const int64_t token = all[static_cast<size_t>(members.front())].words[2];
        part = std::make_unique<ShmCommunicator>(
            static_cast<int>(self - members.begin()), static_cast<int>(members.size()), job,
            std::to_string(token), timeout, [&] { check_peers(operation, rank_); }, true, backend_);
        part->on_wait_ = on_wait_;
    });
    return part;
}

std::shared_ptr<std::byte> ShmCommunicator::allocate(size_t bytes, double timeout) {
    const Operation operation = begin_collective("empty", timeout);
    Signature signature{Kind::allocate, static_cast<uint32_t>(DType::u8)};
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
        segment_->rank(rank_).status.store(RankStatus::closed, std::memory_order_release);
    }
    segment_.reset();
}

}  // namespace tagi_ddp
