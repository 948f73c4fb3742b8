// One rank of an NCCL communicator. Operations are put into a stream, and the caller polls their
// state. Nothing here waits for the device or for other ranks longer than its limit, except
// blocking calls of NCCL, which an abort by another thread ends.
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

// Operations that were called as one group.
class NcclOperation {
 public:
    explicit NcclOperation(std::shared_ptr<NcclRank> rank);

    // Waits up to `limit` seconds until NCCL has put it into the stream; only then may another
    // begin. All methods throw std::runtime_error with the text of NCCL or CUDA.
    bool enqueued(double limit);
    // True if all operations before it, including those of the caller's stream, are complete.
    bool started() const { return started_.complete(); }
    // Waits up to `limit` seconds until it is complete; throws if the rank is aborted first.
    bool complete(double limit) const;
    // Makes later work of `stream` wait for it; the host does not wait.
    void order(uintptr_t stream) const;
    // Includes the present work of `stream` in it.
    void extend(uintptr_t stream);

 private:
    friend class NcclRank;
    std::shared_ptr<NcclRank> rank_;
    Event started_, finished_;
    bool enqueued_ = false;
};

class NcclRank : public std::enable_shared_from_this<NcclRank> {
 public:
    // Begins to connect to the other ranks; `ready` returns true once all are connected. If
    // `minimal`, uses the least memory on the device, because `make_blocking` follows.
    NcclRank(std::shared_ptr<const Nccl> nccl, std::shared_ptr<const Device> device, int rank,
             int size, const NcclId& id, bool minimal);
    ~NcclRank();

    // Waits up to `limit` seconds until nothing is in progress on the host.
    bool ready(double limit);
    // Begins, on all ranks, to make NCCL's calls blocking; `ready` returns true once they are. A
    // blocking call returns when its operations are in the stream, in a fraction of the time,
    // because NCCL starts no thread for it. It only waits for ranks that are not connected yet.
    void make_blocking();

    // Runs `calls`, which call the operations below, as one group, after the present work of
    // `stream` if there is one. Nothing else may use the device memory until the group is complete.
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

    // Ends all operations on this rank, and frees all resources. Operations that are not complete
    // on other ranks never will be.
    void abort();

 private:
    friend class NcclOperation;
    class CallLock;

    void check(int code, const char* function);
    // Puts an operation into the stream by NCCL's `function`, named `name`.
    template <typename... Parameters, typename... Arguments>
    void enqueue(int (*function)(Parameters...), const char* name, Arguments... arguments) {
        check(function(arguments..., communicator_.load(), stream_.handle()), name);
    }
    bool in_progress();
    bool is_in_progress(void* communicator);
    void* alive() const;

    std::shared_ptr<const Nccl> nccl_;
    std::shared_ptr<const Device> device_;
    Stream stream_;
    int rank_, size_;
    // Held by calls of NCCL. Blocking calls share it, so that another thread can query the errors
    // that keep them from returning.
    std::shared_timed_mutex mutex_;
    std::atomic<void*> communicator_{nullptr};
    std::atomic<void*> connecting_{nullptr};  // the one from which the blocking one was split
    std::atomic<bool> is_blocking_{false};
    bool becomes_blocking_ = false;
    void* blocking_ = nullptr;
};

}  // namespace tagi_ddp
