// The communicator of the ranks of one host, over shared memory.
//
// Every collective begins with `enter`: a rank writes the signature of its call, advances its
// `entered` counter, and waits for the other ranks' counters. So calls that differ are found before
// a buffer is written. Private buffers then pass through the ranks' slots in chunks. Buffers from
// `allocate` are reduced in place: each rank reduces its part of all of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/buffer.h"
#include "common/errors.h"
#include "shm/segment.h"

namespace tagi_ddp {

// An exchange of chunks through the ranks' slots.
//
// Each rank writes its chunks into its own slots in turn, and reads those of all ranks. A slot is
// reused once all ranks have consumed its chunk: a rank is at most `num_slots` chunks ahead.
struct PipelinedExchange {
    Signature signature;           // compared between ranks, except `values`
    std::vector<uint32_t> chunks;  // the number of chunks that each rank publishes
    // Writes chunk number `chunk` of this rank into a slot.
    std::function<void(uint32_t chunk, std::byte* slot)> fill = nullptr;
    // Reads chunk number `chunk` of all ranks; the slot of a rank that has fewer is null.
    std::function<void(uint32_t chunk, const std::byte* const* slots)> consume = nullptr;
};

// An exchange in memory of `ShmCommunicator::allocate`, where each rank accesses all ranks' memory.
struct InPlaceExchange {
    Signature signature;  // compared between ranks, with the buffer's offset, except `values`
    Buffer own;
    // Gets all ranks' signatures. If it returns false, which all ranks must do, the exchange ends.
    std::function<bool(const std::vector<Signature>&)> agree = nullptr;
    // Each phase gets the memory of every rank. All ranks complete a phase before any rank begins
    // the next one, or returns.
    std::vector<std::function<void(const std::vector<std::byte*>& parts)>> phases = {};
};

// Every operation throws CommunicatorError if it takes longer than `timeout` seconds. After an
// error the communicator is broken, and every later operation throws. Counts are in elements. One
// operation may run at a time, and one `send` beside it.
class ShmCommunicator {
 public:
    // `name` is the name of the rendezvous; errors contain `job` and `backend`. `on_wait` is called
    // about every 50 ms while an operation waits, and may throw. `version` is the package's.
    // Without `spin`, waits yield the cores to other threads of the ranks, for example those of a
    // network.
    ShmCommunicator(int rank, int size, const std::string& job, const std::string& name,
                    double timeout, std::function<void()> on_wait, bool spin = true,
                    const std::string& backend = "shm", const std::string& version = "");
    ~ShmCommunicator();

    int rank() const { return rank_; }
    int size() const { return size_; }
    const std::string& backend() const { return backend_; }
    // True if an error has broken it, also once it is closed.
    bool failed() const;
    // Sets the purpose of the next collectives, which the ranks compare too.
    void set_purpose(uint64_t purpose) { purpose_ = purpose; }
    // The time for which operations have waited for other ranks so far.
    double seconds_waited() const { return 1e-9 * static_cast<double>(waited_); }

    void all_reduce(const Buffer& in, const Buffer& out, ReduceOp op, double timeout);
    void broadcast(const Buffer& buffer, int root, double timeout);
    void all_gather(const Buffer& in, const Buffer& out, const std::vector<size_t>& counts,
                    double timeout);
    void reduce_scatter(const Buffer& in, const Buffer& out, const std::vector<size_t>& counts,
                        ReduceOp op, double timeout);
    void all_to_all(const Buffer& in, const Buffer& out, const std::vector<size_t>& send_counts,
                    const std::vector<size_t>& recv_counts, double timeout);
    void send(const Buffer& buffer, int dst, int tag, double timeout);
    void recv(const Buffer& buffer, int src, int tag, double timeout);
    void barrier(double timeout);
    // Null if `color` is negative.
    std::unique_ptr<ShmCommunicator> split(int color, int key, double timeout);
    // Makes every rank's current or next operation fail with `reason`. The error blames `ranks`, or
    // this rank if there are none.
    void abort(const std::string& reason, std::vector<int> ranks = {});
    // Throws the error with which the next operation would fail, if it is known. May be called by
    // any thread, but not during `close`.
    void check() const;
    // False in a fork of the process that made this: a fork must not act for its parent.
    bool in_own_process() const;
    // Throws in such a fork.
    void require_own_process() const;
    void close();

    // Collective: returns `bytes` of zeros in the communicator's own memory, which is mapped until
    // the last reference to it is gone.
    std::shared_ptr<std::byte> allocate(size_t bytes, double timeout);

    void exchange(const PipelinedExchange& plan, double timeout);

    // Throws std::invalid_argument if `own` is not in the communicator's own memory.
    void exchange(const InPlaceExchange& plan, double timeout);

 private:
    struct Operation {
        std::string name;  // "all_reduce #17"
        double timeout;
        Clock::time_point deadline;
        bool is_collective = false;
    };

    struct MessageCount {
        uint32_t messages = 0;
        uint32_t packets = 0;
    };

    Operation begin_collective(Kind kind, double timeout);
    Operation begin(const std::string& name, double timeout);
    void require_open(const Operation& operation) const;
    std::string where(const Operation& operation) const;
    [[noreturn]] void raise(const Operation& operation, ErrorKind kind, const std::string& text,
                            std::vector<int> ranks = {}) const;
    // Runs `body`; an error of it breaks the communicator on all ranks.
    void guarded(const Operation& operation, const std::function<void()>& body);
    std::vector<Signature> enter(const Operation& operation, const Signature& own);
    void wait(const Operation& operation, Counter& counter, uint32_t target, int peer);
    void exchange(const Operation& operation, const PipelinedExchange& plan);
    void check_peers(const Operation& operation, int peer) const;
    [[noreturn]] void time_out(const Operation& operation, int peer) const;
    [[noreturn]] void throw_failure(const Operation& operation) const;
    // Breaks the communicator by its first error, and writes that for the other ranks, without
    // `where` at the beginning of its text.
    void fail(const CommunicatorError& error, const std::string& where);
    // Returns true if the operation is to work in the buffer itself. If the buffer is in the
    // communicator's own memory but too small for that, its offset is added to the signature, to
    // be compared as in place.
    bool is_in_place(const Buffer& buffer, Signature& signature) const;

    int rank_;
    int size_;
    std::string job_;
    std::string backend_;
    std::function<void()> on_wait_;
    std::shared_ptr<Segment> segment_;  // null once closed
    int process_;
    bool has_cores_;                  // true if there is a core for each rank
    int spins_;                       // the number of polls of a counter before a wait sleeps
    std::atomic<int64_t> waited_{0};  // the time spent in waits, in nanoseconds
    uint32_t number_ = 0;             // the number of the last collective, for errors
    uint32_t entries_ = 0;            // the number of calls of `enter`
    // The number of rounds of chunks so far, equal on all ranks between operations. A round is
    // chunk number k of all ranks.
    uint32_t round_ = 0;
    uint32_t splits_ = 0;
    uint64_t purpose_ = 0;
    std::vector<MessageCount> sent_, received_;  // to and from each rank
    mutable std::mutex broken_mutex_;
    std::optional<CommunicatorError> broken_;  // the first error
};

}  // namespace tagi_ddp
