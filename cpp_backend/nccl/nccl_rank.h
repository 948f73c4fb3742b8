// One rank of an NCCL communicator. Operations are put into a stream, and the caller asks what has
// become of them. Nothing here waits for the device or for other ranks longer than it is told to,
// but blocking calls of NCCL, which an abort by another thread ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "common/buffer.h"
#include "nccl/cuda.h"
#include "nccl/nccl.h"

namespace tagi_ddp {

class NcclRank;

// Operations that were called together.
class NcclOperation {
 public:
    explicit NcclOperation(std::shared_ptr<NcclRank> rank);

    // Waits up to `limit` seconds until NCCL has put it into the stream; only then may another
    // begin. These throw std::runtime_error with NCCL's or CUDA's text.
    bool enqueued(double limit);
    // Tells whether its turn has come: all before it, of the caller's stream too, is complete.
    bool started() const;
    // Waits up to `limit` seconds until it is complete; throws if the rank was aborted before.
    bool complete(double limit) const;
    // What `stream` gets from now on comes after it; the host does not wait.
    void order(uintptr_t stream) const;
    // Counts what `stream` holds now as a part of it.
    void extend(uintptr_t stream);

 private:
    friend class NcclRank;
    std::shared_ptr<NcclRank> rank_;
    Event started_, finished_;
    bool enqueued_ = false;
};

class NcclRank : public std::enable_shared_from_this<NcclRank> {
 public:
    // Begins to connect to the other ranks; `ready` tells when all are. `minimal`: with the least
    // memory on the device, as `make_blocking` is to follow.
    NcclRank(std::shared_ptr<const Nccl> nccl, std::shared_ptr<const Device> device, int rank,
             int size, const NcclId& id, bool minimal);
    NcclRank(const NcclRank&) = delete;
    NcclRank& operator=(const NcclRank&) = delete;
    ~NcclRank();

    // Waits up to `limit` seconds until nothing is in progress on the host.
    bool ready(double limit);
    // Begins, on all ranks, to make NCCL's calls blocking; `ready` tells when they are. Such a call
    // returns with its operations in the stream, in a fraction of the time, as NCCL starts no
    // thread for it. It waits for other ranks only where they are not connected yet, until an
    // abort.
    void make_blocking();

    // Runs `calls`, which call the operations below, as one group: after what is in `stream` now,
    // if it is given. Pointers are device memory, left alone until the operation is complete.
    std::shared_ptr<NcclOperation> group(std::optional<uintptr_t> stream,
                                         const std::function<void()>& calls);
    void all_reduce(const Buffer& in, const Buffer& out, ReduceOp op);
    void broadcast(const Buffer& buffer, int root);
    void all_gather(const Buffer& in, const Buffer& out, const std::vector<size_t>& counts);
    void reduce_scatter(const Buffer& in, const Buffer& out, const std::vector<size_t>& counts,
                        ReduceOp op);
    void all_to_all(const Buffer& in, const Buffer& out, const std::vector<size_t>& send_counts,
                    const std::vector<size_t>& recv_counts);
    void send(const Buffer& buffer, int dst);
    void recv(const Buffer& buffer, int src);

    // Ends all operations here, and frees everything; what is not complete on the other ranks never
    // will be.
    void abort();

 private:
    friend class NcclOperation;
    class CallLock;

    void check(int code, const char* function);
    bool in_progress();
    bool is_in_progress(void* communicator);
    void* alive() const;

    std::shared_ptr<const Nccl> nccl_;
    std::shared_ptr<const Device> device_;
    Stream stream_;
    int rank_, size_;
    // For NCCL's calls, and whether there is a communicator. Blocking ones share it: another thread
    // is to see what keeps them from returning.
    std::shared_timed_mutex mutex_;
    std::atomic<void*> communicator_{nullptr};
    std::atomic<void*> connecting_{nullptr};  // of which the blocking one was made
    std::atomic<bool> is_blocking_{false};
    bool becomes_blocking_ = false;
    void* blocking_ = nullptr;
};

}  // namespace tagi_ddp
