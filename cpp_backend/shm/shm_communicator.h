// Ranks of one host, over shared memory.
//
// Every collective begins with `enter`: a rank writes what it is about to do, raises its `entered`
// counter and waits for the others', so that calls that do not fit are found before data moves.
// Private buffers then go through the ranks' slots, chunk by chunk, a few chunks ahead
// (`Pipeline`). Buffers from `allocate` are reduced in place: each rank its share, for all.
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
#include "shm/pipeline.h"
#include "shm/segment.h"

namespace tagi_ddp {

// What the ranks do to memory of `ShmCommunicator::allocate`, where each reaches all of it.
struct InPlaceExchange {
    const char* name;     // for errors
    Signature signature;  // must fit on all ranks, where it lies too; `words` are free
    Buffer own;
    // Sees all ranks' signatures; false ends the exchange here (on every rank alike).
    std::function<bool(const std::vector<Signature>&)> agree = nullptr;
    // All ranks are through with one before any begins the next, or goes on after the last.
    // `parts`: every rank's memory.
    std::vector<std::function<void(const std::vector<std::byte*>& parts)>> phases = {};
};

// Every operation waits at most `timeout` seconds and then throws CommunicatorError; after an error
// the communicator is broken and every later operation throws. Counts are in elements. There may be
// one operation at a time, and beside it one `send`.
class ShmCommunicator {
 public:
    // Without `spin` waits leave the cores to other threads of the ranks, as for a network's.
    // `on_wait` is called about every 50 ms while an operation waits, and may throw.
    // `name` is where the ranks find each other, `job` and `backend` what errors call them.
    ShmCommunicator(int rank, int size, const std::string& job, const std::string& name,
                    double timeout, std::function<void()> on_wait, bool spin = true,
                    const std::string& backend = "shm");
    ShmCommunicator(const ShmCommunicator&) = delete;
    ShmCommunicator& operator=(const ShmCommunicator&) = delete;
    ~ShmCommunicator();

    int rank() const { return rank_; }
    int size() const { return size_; }
    const std::string& backend() const { return backend_; }
    // Whether an error has broken it; still known once closed.
    bool failed() const;
    // What the next collectives are for: compared, too.
    void set_purpose(uint64_t purpose) { purpose_ = purpose; }
    // How long operations have waited for other ranks so far.
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
    // Null where `color` is negative.
    std::unique_ptr<ShmCommunicator> split(int color, int key, double timeout);
    // Makes every rank's current or next operation fail with `reason`, by fault of `ranks`, or of
    // this one where there are none.
    void abort(const std::string& reason, std::vector<int> ranks = {});
    // Throws what is known already that would end the next operation; any thread may call it that
    // holds up `close`.
    void check() const;
    // False in a fork of the process that made this, which must not speak for its parent.
    bool in_own_process() const;
    // Throws in such a fork.
    void require_own_process() const;
    void close();

    // A collective operation: `bytes` of this communicator's own memory for each rank, zero at
    // first. It lives as long as somebody holds it.
    std::shared_ptr<std::byte> allocate(size_t bytes, double timeout);

    void exchange(const PipelinedExchange& plan, double timeout);

    // Throws std::invalid_argument when `own` is not the communicator's own memory.
    void exchange(const InPlaceExchange& plan, double timeout);

 private:
    // The operation under way: what errors say of it, and when it ends.
    struct Operation {
        std::string name;  // "all_reduce #17"
        double timeout;
        Clock::time_point deadline;
        bool of_all = false;  // ranks, and not of two
    };

    Operation begin_collective(const char* name, double timeout);
    Operation begin(const std::string& name, double timeout);
    void require_open(const Operation& operation) const;
    std::string where(const Operation& operation) const;
    // Runs `body`; any error of it breaks the communicator on all ranks.
    void guarded(const Operation& operation, const std::function<void()>& body);
    std::vector<Signature> enter(const Operation& operation, const Signature& own);
    void wait(const Operation& operation, Counter& counter, uint32_t target, int peer);
    void exchange(const Operation& operation, const PipelinedExchange& plan);
    void check_peers(const Operation& operation, int peer) const;
    [[noreturn]] void time_out(const Operation& operation, int peer) const;
    [[noreturn]] void throw_failure(const Operation& operation) const;
    // Lets no further operation run, and tells the others why; the first reason counts.
    void fail(const CommunicatorError& error, const std::string& where);
    // Tells the others what happened; without `where`, with which the text may begin.
    void record_failure(const CommunicatorError& error, const std::string& where);
    // Whether to work in the buffer itself, which is this communicator's own memory. If it is, but
    // too small, the signature tells where it lies, as it would in place.
    bool is_in_place(const Buffer& buffer, Signature& signature) const;
    void all_reduce_in_place(const Buffer& buffer, const Signature& signature, ReduceOp op,
                             double timeout);

    int rank_;
    int size_;
    std::string job_;
    std::string backend_;
    double timeout_;
    std::function<void()> on_wait_;
    std::shared_ptr<Segment> segment_;  // null once closed
    int process_;
    bool has_cores_;                  // one for each rank
    int spins_;                       // looks at a counter before sleeping on it
    std::atomic<int64_t> waited_{0};  // for other ranks, in nanoseconds
    uint32_t number_ = 0;             // of the last collective, for errors
    uint32_t entries_ = 0;            // how often `enter` was called
    uint32_t round_ = 0;  // rounds of chunks so far, equal on all ranks between operations
    uint32_t splits_ = 0;
    uint64_t purpose_ = 0;
    std::vector<uint32_t> packets_sent_, packets_received_, messages_sent_, messages_received_;
    mutable std::mutex broken_mutex_;
    std::optional<CommunicatorError> broken_;  // why no further operation can run
};

}  // namespace tagi_ddp
