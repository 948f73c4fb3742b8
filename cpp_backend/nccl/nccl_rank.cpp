#include "nccl/nccl_rank.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/clock.h"

namespace tagi_ddp {
namespace {

constexpr int bytes_number = 1;  // NCCL's number of unsigned bytes, for data that is only copied
constexpr std::chrono::microseconds spinning{200}, pause{50};
constexpr std::chrono::milliseconds abort_wait{200};  // for a call that does not return

// Calls `condition` until it holds or `limit` seconds are over; returns true if it holds.
template <typename Condition>
bool poll(double limit, Condition&& condition) {
    const auto start = Clock::now();
    const auto end = after(std::max(0.0, limit));
    while (!condition()) {
        const auto now = Clock::now();
        if (now >= end) return false;
        if (now - start < spinning) {
            sched_yield();
        } else {
            std::this_thread::sleep_for(pause);
        }
    }
    return true;
}

bool all_equal(const std::vector<size_t>& counts) {
    return std::all_of(counts.begin(), counts.end(), [&](size_t n) { return n == counts[0]; });
}

}  // namespace

// Holds the lock for a call of NCCL: shared if the call is blocking.
class NcclRank::CallLock {
 public:
    explicit CallLock(NcclRank& rank)
        : shared_(rank.mutex_, std::defer_lock), alone_(rank.mutex_, std::defer_lock) {
        if (rank.is_blocking_) {
            shared_.lock();
        } else {
            alone_.lock();
        }
    }

 private:
    std::shared_lock<std::shared_timed_mutex> shared_;
    std::unique_lock<std::shared_timed_mutex> alone_;
};

NcclOperation::NcclOperation(std::shared_ptr<NcclRank> rank)
    : rank_(std::move(rank)), started_(rank_->device_), finished_(rank_->device_) {}

bool NcclOperation::enqueued(double limit) {
    if (enqueued_) return true;
    if (!rank_->ready(limit)) return false;
    finished_.record(rank_->stream_.handle());
    enqueued_ = true;
    return true;
}

bool NcclOperation::complete(double limit) const {
    if (!enqueued_) return false;
    return poll(limit, [this] {
        const bool finished = finished_.complete();
        rank_->in_progress();  // throws asynchronous errors; an abort completes events too
        return finished;
    });
}

void NcclOperation::order(uintptr_t stream) const {
    finished_.order(reinterpret_cast<void*>(stream));
}

void NcclOperation::extend(uintptr_t stream) { finished_.record(reinterpret_cast<void*>(stream)); }

NcclRank::NcclRank(std::shared_ptr<const Nccl> nccl, std::shared_ptr<const Device> device, int rank,
                   int size, const NcclId& id, bool minimal)
    : nccl_(std::move(nccl)),
      device_(std::move(device)),
      stream_(device_),
      rank_(rank),
      size_(size) {
    const Device::Guard guard(*device_);
    NcclConfig config;
    if (minimal) config.min_ctas = config.max_ctas = 1;
    void* communicator = nullptr;
    const int code = nccl_->init_rank(&communicator, size, id, rank, &config);
    communicator_ = communicator;
    check(code, "ncclCommInitRankConfig");
}

NcclRank::~NcclRank() {
    try {
        abort();
    } catch (const std::exception&) {
        // The driver has ended, and has freed all resources.
    }
}

void NcclRank::check(int code, const char* function) {
    nccl_->check(code, function, communicator_);
}

void* NcclRank::alive() const {
    void* communicator = communicator_;
    if (communicator == nullptr) throw std::runtime_error("the communicator was aborted");
    return communicator;
}

void NcclRank::make_blocking() {
    const CallLock lock(*this);
    const Device::Guard guard(*device_);
    NcclConfig config;
    config.blocking = 1;
    check(nccl_->split(alive(), 0, rank_, &blocking_, &config), "ncclCommSplit");
    becomes_blocking_ = true;
}

bool NcclRank::in_progress() {
    const CallLock lock(*this);
    const Device::Guard guard(*device_);
    if (is_in_progress(alive())) return true;
    if (!becomes_blocking_) return false;
    becomes_blocking_ = false;
    connecting_ = communicator_.exchange(blocking_);
    is_blocking_ = true;
    return is_in_progress(alive());
}

bool NcclRank::is_in_progress(void* communicator) {
    int code = Nccl::success;
    check(nccl_->get_async_error(communicator, &code), "ncclCommGetAsyncError");
    check(code, "asynchronous error");
    return code == Nccl::in_progress;
}

bool NcclRank::ready(double limit) {
    return poll(limit, [this] { return !in_progress(); });
}

std::shared_ptr<NcclOperation> NcclRank::group(std::optional<uintptr_t> stream,
                                               const std::function<void()>& calls) {
    auto operation = std::make_shared<NcclOperation>(shared_from_this());
    const CallLock lock(*this);
    const Device::Guard guard(*device_);
    alive();
    if (stream) {
        Event before(device_);
        before.record(reinterpret_cast<void*>(*stream));
        before.order(stream_.handle());
    }
    operation->started_.record(stream_.handle());
    check(nccl_->group_start(), "ncclGroupStart");
    try {
        calls();
    } catch (...) {
        nccl_->group_end();  // its state belongs to the thread
        throw;
    }
    check(nccl_->group_end(), "ncclGroupEnd");
    if (is_blocking_) {
        operation->finished_.record(stream_.handle());
        operation->enqueued_ = true;
    }
    return operation;
}

void NcclRank::all_reduce(const Buffer& in, const Buffer& out, ReduceOp op) {
    enqueue(nccl_->all_reduce, "ncclAllReduce", in.data, out.data, in.count,
            Nccl::number_of(in.dtype), Nccl::number_of(op));
}

void NcclRank::broadcast(const Buffer& buffer, int root) {
    enqueue(nccl_->broadcast, "ncclBroadcast", buffer.data, buffer.data, buffer.bytes(),
            bytes_number, root);
}

void NcclRank::all_gather(const Buffer& in, const Buffer& out, const std::vector<size_t>& counts) {
    if (all_equal(counts)) {
        enqueue(nccl_->all_gather, "ncclAllGather", in.data, out.data, in.bytes(), bytes_number);
        return;
    }
    std::byte* part = out.byte_data();
    for (int root = 0; root < size_; ++root) {
        const size_t bytes = counts[static_cast<size_t>(root)] * size_of(in.dtype);
        const void* source = root == rank_ ? in.data : part;
        enqueue(nccl_->broadcast, "ncclBroadcast", source, part, bytes, bytes_number, root);
        part += bytes;
    }
}

void NcclRank::reduce_scatter(const Buffer& in, const Buffer& out,
                              const std::vector<size_t>& counts, ReduceOp op) {
    const int dtype = Nccl::number_of(in.dtype);
    if (all_equal(counts)) {
        enqueue(nccl_->reduce_scatter, "ncclReduceScatter", in.data, out.data, out.count, dtype,
                Nccl::number_of(op));
        return;
    }
    const std::byte* part = in.byte_data();
    for (int root = 0; root < size_; ++root) {
        const size_t count = counts[static_cast<size_t>(root)];
        enqueue(nccl_->reduce, "ncclReduce", part, out.data, count, dtype, Nccl::number_of(op),
                root);
        part += count * size_of(in.dtype);
    }
}

void NcclRank::all_to_all(const Buffer& in, const Buffer& out,
                          const std::vector<size_t>& send_counts,
                          const std::vector<size_t>& recv_counts) {
    const size_t width = size_of(in.dtype);
    if (nccl_->all_to_all != nullptr && all_equal(send_counts) && send_counts == recv_counts) {
        enqueue(nccl_->all_to_all, "ncclAlltoAll", in.data, out.data, send_counts[0] * width,
                bytes_number);
        return;
    }
    Buffer sent{in.data, 0, in.dtype};
    Buffer received{out.data, 0, out.dtype};
    for (int peer = 0; peer < size_; ++peer) {
        sent.count = send_counts[static_cast<size_t>(peer)];
        received.count = recv_counts[static_cast<size_t>(peer)];
        if (sent.count != 0) send(sent, peer);
        if (received.count != 0) recv(received, peer);
        sent.data = sent.byte_data() + sent.bytes();
        received.data = received.byte_data() + received.bytes();
    }
}

void NcclRank::send(const Buffer& buffer, int dst) {
    enqueue(nccl_->send, "ncclSend", buffer.data, buffer.bytes(), bytes_number, dst);
}

void NcclRank::recv(const Buffer& buffer, int src) {
    enqueue(nccl_->recv, "ncclRecv", buffer.data, buffer.bytes(), bytes_number, src);
}

void NcclRank::abort() {
    std::unique_lock<std::shared_timed_mutex> lock(mutex_, std::defer_lock);
    if (is_blocking_) {
        (void)lock.try_lock_for(abort_wait);  // the abort ends a call that waits in NCCL
    } else {
        lock.lock();
    }
    const Device::Guard guard(*device_);
    int code = Nccl::success;
    for (std::atomic<void*>* held : {&communicator_, &connecting_}) {
        void* communicator = held->exchange(nullptr);
        if (communicator == nullptr) continue;
        const int result = nccl_->abort(communicator);
        if (code == Nccl::success) code = result;
    }
    nccl_->check(code, "ncclCommAbort", nullptr);
}

}  // namespace tagi_ddp
