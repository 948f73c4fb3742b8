#include "shm_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>

#include "reduce.h"

namespace tagi_ddp {
namespace {

using std::chrono::nanoseconds;

constexpr nanoseconds look_around{50'000'000};  // how often a sleeper checks that its peers live
constexpr int spins_with_core = 4000;           // about 50 us: longer than a well met peer needs
constexpr int spins_without_core = 50;          // more ranks than cores: let the others run

const char* name_of(Kind kind) {
    constexpr const char* names[] = {"nothing",        "all_reduce", "broadcast", "all_gather",
                                     "reduce_scatter", "all_to_all", "barrier",   "split",
                                     "empty",          "update"};
    const auto index = static_cast<uint32_t>(kind);
    return index < sizeof names / sizeof *names ? names[index] : "unknown";
}

std::string words_of(const Signature& s) {
    std::string text = name_of(s.kind);
    if (s.kind == Kind::barrier || s.kind == Kind::split) return text;
    text += " of " + std::to_string(s.count) + " " + name_of(static_cast<DType>(s.dtype));
    if (s.kind == Kind::all_reduce || s.kind == Kind::reduce_scatter) {
        text += std::string(" (") + name_of(static_cast<ReduceOp>(s.op)) + ")";
    }
    if (s.kind == Kind::broadcast) text += " from rank " + std::to_string(s.root);
    return text;
}

std::string list(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); ++i) {
        text += (i ? ", " : "") + std::to_string(ranks[i]);
    }
    return text;
}

std::string seconds(double value) {
    std::string text = std::to_string(value);
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
    return text + " s";
}

Clock::time_point after(double timeout) {
    // A century is forever, and does not overflow.
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::min(timeout, 3e9)));
}

uint64_t hash(const std::vector<size_t>& counts) {
    uint64_t value = 1469598103934665603ull;
    for (size_t count : counts) value = (value ^ count) * 1099511628211ull;
    return value;
}

size_t total(const std::vector<size_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), size_t{0});
}

uint32_t chunks_for(size_t bytes) {
    return static_cast<uint32_t>((bytes + slot_bytes - 1) / slot_bytes);
}

// memcpy must not be given null, not even for nothing.
void copy_bytes(void* to, const void* from, size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
}

// Bytes [begin, end) of a rank's stream of chunks belong at `to`.
struct Range {
    size_t begin;
    size_t end;
    std::byte* to;

    void take(uint32_t chunk, const std::byte* slot) const {
        const size_t chunk_begin = static_cast<size_t>(chunk) * slot_bytes;
        const size_t from = std::max(begin, chunk_begin);
        const size_t until = std::min(end, chunk_begin + slot_bytes);
        if (from < until)
            std::memcpy(to + (from - begin), slot + (from - chunk_begin), until - from);
    }
};

// Publishes [data, data + bytes) chunk by chunk.
std::function<void(uint32_t, std::byte*)> stream(const std::byte* data, size_t bytes) {
    return [data, bytes](uint32_t chunk, std::byte* slot) {
        const size_t begin = static_cast<size_t>(chunk) * slot_bytes;
        std::memcpy(slot, data + begin, std::min(slot_bytes, bytes - begin));
    };
}

}  // namespace

ShmCommunicator::ShmCommunicator(int rank, int size, const std::string& job, double timeout,
                                 std::function<void()> on_wait)
    : rank_(rank),
      size_(size),
      job_(job),
      timeout_(timeout),
      on_wait_(std::move(on_wait)),
      segment_(std::make_shared<Segment>(Meeting{job, rank, size, after(timeout), on_wait_})),
      process_(getpid()),
      spins_(static_cast<long>(size) <= sysconf(_SC_NPROCESSORS_ONLN) ? spins_with_core
                                                                      : spins_without_core) {
    const size_t n = static_cast<size_t>(size);
    packets_sent_.resize(n);
    packets_received_.resize(n);
    messages_sent_.resize(n);
    messages_received_.resize(n);
    const Operation operation = begin("init", 0, timeout);
    guarded(operation, [&] { enter(operation, Signature{Kind::barrier}); });
}

ShmCommunicator::~ShmCommunicator() { close(); }

// --- waiting ------------------------------------------------------------------------------------

ShmCommunicator::Operation ShmCommunicator::begin(const char* name, uint32_t number,
                                                  double timeout) const {
    const Operation operation{name, number, timeout, after(timeout)};
    if (!segment_) {
        throw CommunicatorError(
            ErrorKind::general,
            describe(operation) + "the communicator is closed. Make a new one.");
    }
    if (!broken_.empty()) {
        throw CommunicatorError(
            ErrorKind::general,
            describe(operation) +
                "an earlier operation failed, so no further one can run: " + broken_);
    }
    return operation;
}

std::string ShmCommunicator::describe(const Operation& operation) const {
    return std::string(operation.name) + " #" + std::to_string(operation.number) + " on rank " +
           std::to_string(rank_) + " of " + std::to_string(size_) + " (shm): ";
}

template <typename Body>
void ShmCommunicator::guarded(const Operation& operation, Body&& body) {
    try {
        body();
    } catch (const CommunicatorError& error) {
        record_failure(error);
        broken_ = error.what();
        throw;
    } catch (...) {
        // Interrupted from outside: the others must not wait for the rest of this operation.
        broken_ = describe(operation) + "interrupted on this rank.";
        record_failure(CommunicatorError(
            ErrorKind::peer_lost, describe(operation) + "interrupted on that rank.", {rank_}));
        throw;
    }
}

void ShmCommunicator::record_failure(const CommunicatorError& error) {
    Failure& failure = segment_->failure();
    uint32_t none = 0;
    if (!failure.state.compare_exchange_strong(none, 1)) return;
    failure.kind = static_cast<uint32_t>(error.kind());
    failure.reporter = rank_;
    failure.num_culprits = 0;
    for (int culprit : error.ranks()) {
        if (failure.num_culprits == 64) break;
        failure.culprits[failure.num_culprits++] = culprit;
    }
    std::strncpy(failure.text, error.what(), sizeof failure.text - 1);
    failure.state.store(2, std::memory_order_release);
}

void ShmCommunicator::throw_failure(const Operation& operation) {
    const Failure& failure = segment_->failure();
    std::vector<int> culprits(failure.culprits, failure.culprits + failure.num_culprits);
    const std::string head = culprits.empty() ? "" : list(culprits) + " failed the group: ";
    throw CommunicatorError(static_cast<ErrorKind>(failure.kind),
                            describe(operation) + head + failure.text + " (reported by rank " +
                                std::to_string(failure.reporter) + ")",
                            culprits);
}

void ShmCommunicator::check_peers(const Operation& operation, int peer) {
    if (on_wait_) on_wait_();
    if (segment_->failure().state.load(std::memory_order_acquire) == 2) throw_failure(operation);
    std::vector<int> dead;
    for (int r = 0; r < size_; ++r) {
        if (r != rank_ && !segment_->alive(r)) dead.push_back(r);
    }
    if (!dead.empty()) {
        throw CommunicatorError(ErrorKind::peer_lost,
                                describe(operation) + list(dead) +
                                    " died. Look at the output of that rank for the reason; start "
                                    "the job again.",
                                dead);
    }
    if (segment_->rank(peer).status.load(std::memory_order_acquire) == RankStatus::closed) {
        throw CommunicatorError(ErrorKind::peer_lost,
                                describe(operation) + "rank " + std::to_string(peer) +
                                    " left: it closed its communicator. All ranks must call the "
                                    "same operations.",
                                {peer});
    }
}

void ShmCommunicator::time_out(const Operation& operation, int peer) {
    std::vector<int> missing;
    for (int r = 0; r < size_; ++r) {
        if (!segment_->rank(r).entered.reached(number_)) missing.push_back(r);
    }
    if (missing.empty()) missing.push_back(peer);
    throw CommunicatorError(ErrorKind::timeout,
                            describe(operation) + list(missing) + " did not come within " +
                                seconds(operation.timeout) +
                                ". Look at the output of that rank; raise timeout= if it is only "
                                "slow.",
                            missing);
}

void ShmCommunicator::wait(const Operation& operation, Counter& counter, uint32_t target,
                           int peer) {
    for (int i = 0; i < spins_; ++i) {
        if (counter.reached(target)) return;
        relax();
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
    ++number_;
    RankState& self = segment_->rank(rank_);
    self.signatures[number_ % 2] = own;
    self.entered.advance(number_);
    std::vector<Signature> all(static_cast<size_t>(size_));
    std::vector<int> different;
    for (int r = 0; r < size_; ++r) {
        RankState& other = segment_->rank(r);
        if (r != rank_) wait(operation, other.entered, number_, r);
        all[static_cast<size_t>(r)] = other.signatures[number_ % 2];
        if (!all[static_cast<size_t>(r)].fits(own)) different.push_back(r);
    }
    if (!different.empty()) {
        const Signature& theirs = all[static_cast<size_t>(different.front())];
        std::string detail = words_of(theirs);
        if (detail == words_of(own)) detail += " with other counts";
        throw CommunicatorError(ErrorKind::mismatch,
                                describe(operation) + "this rank calls " + words_of(own) + ", " +
                                    list(different) + " called " + detail +
                                    ". All ranks must call the same operations in the same order, "
                                    "with arguments that fit.",
                                different);
    }
    return all;
}

// --- chunks -------------------------------------------------------------------------------------

void ShmCommunicator::wait_finished(const Operation& operation, uint32_t round) {
    for (int r = 0; r < size_; ++r) {
        if (r != rank_) wait(operation, segment_->rank(r).finished, round, r);
    }
}

void ShmCommunicator::exchange(const Exchange& plan, double timeout) {
    const Operation operation = begin(plan.name, number_ + 1, timeout);
    guarded(operation, [&] {
        RankState& self = segment_->rank(rank_);
        uint32_t published = 0;
        const auto publish = [&] {
            plan.fill(published, segment_->slot(rank_, round_ + published));
            self.published.advance(round_ + ++published);
        };
        // A slot is free once all have read the chunk before last in it.
        const auto slot_is_free = [&] {
            for (int r = 0; r < size_; ++r) {
                if (!segment_->rank(r).finished.reached(round_ + published + 1 - num_slots)) {
                    return false;
                }
            }
            return true;
        };
        // The first chunk goes with the signature: a small exchange waits once.
        if (plan.own_chunks > 0) {
            wait_finished(operation, round_ + 1 - num_slots);
            publish();
        }
        const std::vector<Signature> all = enter(operation, plan.signature);
        const std::vector<uint32_t> chunks = plan.agree(all);
        if (chunks.empty()) {
            // Chunks published already count as one round that nobody reads.
            ++round_;
            self.published.advance(round_);
            self.finished.advance(round_);
            return;
        }
        const uint32_t rounds = *std::max_element(chunks.begin(), chunks.end());
        std::vector<const std::byte*> slots(static_cast<size_t>(size_));
        for (uint32_t chunk = 0; chunk < rounds; ++chunk) {
            while (published < plan.own_chunks && published < chunk + num_slots) {
                if (!slot_is_free()) {
                    if (published > chunk) break;
                    wait_finished(operation, round_ + published + 1 - num_slots);
                }
                publish();
            }
            for (int r = 0; r < size_; ++r) {
                const bool has_chunk = chunk < chunks[static_cast<size_t>(r)];
                if (has_chunk && r != rank_) {
                    wait(operation, segment_->rank(r).published, round_ + chunk + 1, r);
                }
                slots[static_cast<size_t>(r)] =
                    has_chunk ? segment_->slot(r, round_ + chunk) : nullptr;
            }
            plan.consume(chunk, slots.data());
            self.finished.advance(round_ + chunk + 1);
        }
        round_ += rounds;
        self.published.advance(round_);
    });
}

// --- collectives --------------------------------------------------------------------------------

void ShmCommunicator::all_reduce(const Buffer& in, const Buffer& out, ReduceOp op, double timeout) {
    Signature signature{Kind::all_reduce, static_cast<uint32_t>(in.dtype),
                        static_cast<uint32_t>(op)};
    signature.count = in.count;
    const auto place =
        in.data == out.data && segment_ ? segment_->find(in.byte_data(), in.bytes()) : std::nullopt;
    if (place) {
        signature.detail = place->offset;
        const Operation operation = begin("all_reduce", number_ + 1, timeout);
        guarded(operation, [&] {
            enter(operation, signature);
            reduce_own_memory(operation, in, op, *place);
        });
        return;
    }
    const size_t element = size_of(in.dtype);
    Exchange plan{
        "all_reduce", signature, chunks_for(in.bytes()), stream(in.byte_data(), in.bytes()),
        nullptr,      nullptr};
    plan.agree = [&](const std::vector<Signature>&) {
        return std::vector<uint32_t>(static_cast<size_t>(size_), plan.own_chunks);
    };
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        const size_t begin = static_cast<size_t>(chunk) * slot_bytes;
        reduce(in.dtype, op, slots, size_, out.byte_data() + begin,
               std::min(slot_bytes, in.bytes() - begin) / element);
    };
    exchange(plan, timeout);
}

void ShmCommunicator::reduce_own_memory(const Operation& operation, const Buffer& buffer,
                                        ReduceOp op, const Segment::Place& place) {
    // Shares begin on cache lines, so that no two ranks write to one.
    const size_t element = size_of(buffer.dtype);
    const size_t unit = 64 / element;
    const size_t n = static_cast<size_t>(size_);
    const size_t units = (buffer.count + unit - 1) / unit;
    const size_t me = static_cast<size_t>(rank_);
    const size_t begin = std::min(buffer.count, units * me / n * unit);
    const size_t end = std::min(buffer.count, units * (me + 1) / n * unit);
    const size_t block = 32 * 1024 / element;
    std::vector<std::byte*> parts(n);
    std::vector<const std::byte*> sources(n);
    for (size_t at = begin; at < end; at += block) {
        const size_t count = std::min(block, end - at);
        for (int r = 0; r < size_; ++r) {
            const size_t i = static_cast<size_t>(r);
            parts[i] = buffer.byte_data() + at * element + place.stride * (r - rank_);
            sources[i] = parts[i];
        }
        reduce(buffer.dtype, op, sources.data(), size_, parts[me], count);
        for (size_t i = 0; i < n; ++i) {
            if (i != me) std::memcpy(parts[i], parts[me], count * element);
        }
    }
    ++round_;
    segment_->rank(rank_).published.advance(round_);
    segment_->rank(rank_).finished.advance(round_);
    wait_finished(operation, round_);
}

void ShmCommunicator::broadcast(const Buffer& buffer, int root, double timeout) {
    Signature signature{Kind::broadcast, static_cast<uint32_t>(buffer.dtype), 0,
                        static_cast<uint32_t>(root)};
    signature.count = buffer.count;
    const uint32_t chunks = chunks_for(buffer.bytes());
    Exchange plan{"broadcast",
                  signature,
                  rank_ == root ? chunks : 0,
                  stream(buffer.byte_data(), buffer.bytes()),
                  nullptr,
                  nullptr};
    plan.agree = [&](const std::vector<Signature>&) {
        std::vector<uint32_t> all(static_cast<size_t>(size_));
        all[static_cast<size_t>(root)] = chunks;
        return all;
    };
    const Range range{0, buffer.bytes(), buffer.byte_data()};
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        if (rank_ != root) range.take(chunk, slots[root]);
    };
    exchange(plan, timeout);
}

void ShmCommunicator::all_gather(const Buffer& in, const Buffer& out,
                                 const std::vector<size_t>& counts, double timeout) {
    Signature signature{Kind::all_gather, static_cast<uint32_t>(in.dtype)};
    signature.count = total(counts);
    signature.detail = hash(counts);
    const size_t element = size_of(in.dtype);
    std::vector<Range> ranges;
    std::vector<uint32_t> chunks;
    size_t offset = 0;
    for (size_t count : counts) {
        ranges.push_back({0, count * element, out.byte_data() + offset});
        chunks.push_back(chunks_for(count * element));
        offset += count * element;
    }
    Exchange plan{"all_gather",
                  signature,
                  chunks[static_cast<size_t>(rank_)],
                  stream(in.byte_data(), in.bytes()),
                  nullptr,
                  nullptr};
    plan.agree = [&](const std::vector<Signature>&) { return chunks; };
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        for (size_t r = 0; r < ranges.size(); ++r) {
            if (slots[r] != nullptr) ranges[r].take(chunk, slots[r]);
        }
    };
    exchange(plan, timeout);
}

void ShmCommunicator::reduce_scatter(const Buffer& in, const Buffer& out,
                                     const std::vector<size_t>& counts, ReduceOp op,
                                     double timeout) {
    Signature signature{Kind::reduce_scatter, static_cast<uint32_t>(in.dtype),
                        static_cast<uint32_t>(op)};
    signature.count = in.count;
    signature.detail = hash(counts);
    const size_t element = size_of(in.dtype);
    const auto own = counts.begin() + rank_;
    const size_t begin = std::accumulate(counts.begin(), own, size_t{0}) * element;
    const size_t end = begin + *own * element;
    Exchange plan{
        "reduce_scatter", signature, chunks_for(in.bytes()), stream(in.byte_data(), in.bytes()),
        nullptr,          nullptr};
    plan.agree = [&](const std::vector<Signature>&) {
        return std::vector<uint32_t>(static_cast<size_t>(size_), plan.own_chunks);
    };
    std::vector<const std::byte*> sources(static_cast<size_t>(size_));
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        const size_t chunk_begin = static_cast<size_t>(chunk) * slot_bytes;
        const size_t from = std::max(begin, chunk_begin);
        const size_t until = std::min(end, chunk_begin + slot_bytes);
        if (from >= until) return;
        for (size_t r = 0; r < sources.size(); ++r) sources[r] = slots[r] + (from - chunk_begin);
        reduce(in.dtype, op, sources.data(), size_, out.byte_data() + (from - begin),
               (until - from) / element);
    };
    exchange(plan, timeout);
}

void ShmCommunicator::all_to_all(const Buffer& in, const Buffer& out,
                                 const std::vector<size_t>& send_counts,
                                 const std::vector<size_t>& recv_counts, double timeout) {
    const size_t n = static_cast<size_t>(size_);
    const size_t element = size_of(in.dtype);
    Signature signature{Kind::all_to_all, static_cast<uint32_t>(in.dtype)};
    // Every rank must know where its part lies in every other's: the counts travel first.
    std::vector<uint64_t> mine(send_counts.begin(), send_counts.end());
    std::vector<uint64_t> matrix(n * n);
    all_gather({mine.data(), n, DType::u64}, {matrix.data(), n * n, DType::u64},
               std::vector<size_t>(n, n), timeout);

    std::vector<Range> ranges;
    std::vector<uint32_t> chunks;
    std::vector<int> different;
    std::byte* to = out.byte_data();
    for (size_t r = 0; r < n; ++r) {
        const auto row = matrix.begin() + static_cast<std::ptrdiff_t>(r * n);
        const size_t begin = std::accumulate(row, row + rank_, size_t{0}) * element;
        const size_t bytes = row[rank_] * element;
        if (row[rank_] != recv_counts[r]) different.push_back(static_cast<int>(r));
        ranges.push_back({begin, begin + bytes, to});
        chunks.push_back(chunks_for(std::accumulate(row, row + size_, size_t{0}) * element));
        to += recv_counts[r] * element;
    }
    signature.words[0] = different.empty() ? 0 : 1;
    const uint32_t own_chunks = chunks[static_cast<size_t>(rank_)];
    Exchange plan{"all_to_all", signature, own_chunks, stream(in.byte_data(), in.bytes()),
                  nullptr,      nullptr};
    plan.agree = [&](const std::vector<Signature>& all) {
        for (size_t r = 0; r < n; ++r) {
            if (all[r].words[0] == 0) continue;
            throw CommunicatorError(
                ErrorKind::mismatch,
                "all_to_all #" + std::to_string(number_) + " on rank " + std::to_string(rank_) +
                    " of " + std::to_string(size_) + " (shm): rank " + std::to_string(r) +
                    " expects other counts (recv_counts) than the others send it. "
                    "send_counts[b] of rank a must be recv_counts[a] of rank b.",
                {static_cast<int>(r)});
        }
        return chunks;
    };
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        for (size_t r = 0; r < n; ++r) {
            if (slots[r] != nullptr) ranges[r].take(chunk, slots[r]);
        }
    };
    exchange(plan, timeout);
}

void ShmCommunicator::barrier(double timeout) {
    const Operation operation = begin("barrier", number_ + 1, timeout);
    guarded(operation, [&] { enter(operation, Signature{Kind::barrier}); });
}

// --- messages -----------------------------------------------------------------------------------

void ShmCommunicator::send(const Buffer& buffer, int dst, int tag, double timeout) {
    const size_t peer = static_cast<size_t>(dst);
    const Operation operation = begin("send", ++messages_sent_[peer], timeout);
    guarded(operation, [&] {
        Channel& channel = segment_->channel(rank_, dst);
        size_t at = 0;
        do {  // an empty message is one packet too
            const uint32_t number = packets_sent_[peer];
            wait(operation, channel.received, number + 1 - num_packets, dst);
            const size_t bytes = std::min(packet_bytes, buffer.bytes() - at);
            channel.headers[number % num_packets] = {buffer.bytes(),
                                                     static_cast<uint32_t>(buffer.dtype), tag};
            copy_bytes(segment_->packet(rank_, dst, number), buffer.byte_data() + at, bytes);
            at += bytes;
            channel.sent.advance(++packets_sent_[peer]);
        } while (at < buffer.bytes());
    });
}

void ShmCommunicator::recv(const Buffer& buffer, int src, int tag, double timeout) {
    const size_t peer = static_cast<size_t>(src);
    const Operation operation = begin("recv", ++messages_received_[peer], timeout);
    guarded(operation, [&] {
        Channel& channel = segment_->channel(src, rank_);
        size_t at = 0;
        do {
            const uint32_t number = packets_received_[peer];
            wait(operation, channel.sent, number + 1, src);
            const PacketHeader& header = channel.headers[number % num_packets];
            if (header.total_bytes != buffer.bytes() || header.tag != tag ||
                header.dtype != static_cast<uint32_t>(buffer.dtype)) {
                throw CommunicatorError(
                    ErrorKind::mismatch,
                    describe(operation) + "expected " + std::to_string(buffer.bytes()) +
                        " bytes of " + name_of(buffer.dtype) + " with tag " + std::to_string(tag) +
                        ", rank " + std::to_string(src) + " sent " +
                        std::to_string(header.total_bytes) + " bytes of " +
                        name_of(static_cast<DType>(header.dtype)) + " with tag " +
                        std::to_string(header.tag) +
                        ". Messages must be received as they are sent.",
                    {src});
            }
            const size_t bytes = std::min(packet_bytes, buffer.bytes() - at);
            copy_bytes(buffer.byte_data() + at, segment_->packet(src, rank_, number), bytes);
            at += bytes;
            channel.received.advance(++packets_received_[peer]);
        } while (at < buffer.bytes());
    });
}

// --- groups and the end -------------------------------------------------------------------------

std::unique_ptr<Communicator> ShmCommunicator::split(int color, int key, double timeout) {
    const Operation operation = begin("split", number_ + 1, timeout);
    std::vector<Signature> all;
    guarded(operation, [&] {
        Signature signature{Kind::split};
        signature.words[0] = color;
        signature.words[1] = key;
        all = enter(operation, signature);
    });
    const std::string job =
        job_ + "/split" + std::to_string(splits_++) + "." + std::to_string(color);
    if (color < 0) return nullptr;
    std::vector<int> members;
    for (int r = 0; r < size_; ++r) {
        if (all[static_cast<size_t>(r)].words[0] == color) members.push_back(r);
    }
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
        return all[static_cast<size_t>(a)].words[1] < all[static_cast<size_t>(b)].words[1];
    });
    const auto self = std::find(members.begin(), members.end(), rank_);
    return std::make_unique<ShmCommunicator>(static_cast<int>(self - members.begin()),
                                             static_cast<int>(members.size()), job, timeout,
                                             on_wait_);
}

std::shared_ptr<std::byte> ShmCommunicator::allocate(size_t bytes, double timeout) {
    const Operation operation = begin("empty", number_ + 1, timeout);
    Signature signature{Kind::allocate, static_cast<uint32_t>(DType::u8)};
    signature.count = bytes;
    std::byte* memory = nullptr;
    guarded(operation, [&] {
        enter(operation, signature);
        memory = segment_->allocate(bytes);
    });
    return {segment_, memory};
}

void ShmCommunicator::abort(const std::string& reason) {
    if (!segment_ || !broken_.empty()) return;
    record_failure(CommunicatorError(
        ErrorKind::peer_lost, "rank " + std::to_string(rank_) + " gave up: " + reason, {rank_}));
    broken_ = "this rank gave up: " + reason;
}

void ShmCommunicator::close() {
    if (!segment_) return;
    if (getpid() == process_) {
        segment_->rank(rank_).status.store(RankStatus::closed, std::memory_order_release);
    }
    segment_.reset();
}

}  // namespace tagi_ddp
