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

constexpr int bytes_number = 1;  // NCCL's unsigned bytes, for what is only copied
constexpr std::chrono::microseconds spinning{200}, pause{50};
constexpr std::chrono::milliseconds patience{200};  // of an abort, for a call that does not return

// Calls `condition` until it holds or `limit` seconds are over; returns whether it holds.
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

int number_of(DType dtype) {
    const auto number = Nccl::number_of(dtype);
    if (!number) {
        throw std::runtime_error(std::string("NCCL does not reduce ") + name_of(dtype));
    }
    return *number;
}

bool all_equal(const std::vector<size_t>& counts) {
    return std::all_of(counts.begin(), counts.end(), [&](size_t n) { return n == counts[0]; });
}

}  // namespace

// Holds the lock as a call of NCCL needs it.
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

bool NcclOperation::started() const { return started_.complete(); }

bool NcclOperation::complete(double limit) const {
    if (!enqueued_) return false;
    return poll(limit, [this] {
        const bool finished = finished_.complete();
        rank_->in_progress();  // throws the errors that came meanwhile; aborting ends events, too
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
        // The driver is gone, and all that it held.
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
    check(nccl_->all_reduce(in.data, out.data, in.count, number_of(in.dtype), Nccl::number_of(op),
                            communicator_, stream_.handle()),
          "ncclAllReduce");
}

void NcclRank::broadcast(const Buffer& buffer, int root) {
    check(nccl_->broadcast(buffer.data, buffer.data, buffer.bytes(), bytes_number, root,
                           communicator_, stream_.handle()),
          "ncclBroadcast");
}

void NcclRank::all_gather(const Buffer& in, const Buffer& out, const std::vector<size_t>& counts) {
    if (all_equal(counts)) {
        check(nccl_->all_gather(in.data, out.data, in.bytes(), bytes_number, communicator_,
                                stream_.handle()),
              "ncclAllGather");
        return;
    }
    std::byte* part = out.byte_data();
    for (int root = 0; root < size_; ++root) {
        const size_t bytes = counts[static_cast<size_t>(root)] * size_of(in.dtype);
        const void* source = root == rank_ ? in.data : part;
        check(nccl_->broadcast(source, part, bytes, bytes_number, root, communicator_,
                               stream_.handle()),
              "ncclBroadcast");
        part += bytes;
    }
}

void NcclRank::reduce_scatter(const Buffer& in, const Buffer& out,
                              const std::vector<size_t>& counts, ReduceOp op) {
    const int dtype = number_of(in.dtype);
    if (all_equal(counts)) {
        check(nccl_->reduce_scatter(in.data, out.data, out.count, dtype, Nccl::number_of(op),
                                    communicator_, stream_.handle()),
              "ncclReduceScatter");
        return;
    }
    const std::byte* part = in.byte_data();
    for (int root = 0; root < size_; ++root) {
        const size_t count = counts[static_cast<size_t>(root)];
        check(nccl_->reduce(part, out.data, count, dtype, Nccl::number_of(op), root, communicator_,
                            stream_.handle()),
              "ncclReduce");
        part += count * size_of(in.dtype);
    }
}

void NcclRank::all_to_all(const Buffer& in, const Buffer& out,
                          const std::vector<size_t>& send_counts,
                          const std::vector<size_t>& recv_counts) {
    const size_t width = size_of(in.dtype);
    if (nccl_->all_to_all != nullptr && all_equal(send_counts) && send_counts == recv_counts) {
        check(nccl_->all_to_all(in.data, out.data, send_counts[0] * width, bytes_number,
                                communicator_, stream_.handle()),
              "ncclAlltoAll");
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
    check(nccl_->send(buffer.data, buffer.bytes(), bytes_number, dst, communicator_,
                      stream_.handle()),
          "ncclSend");
}

void NcclRank::recv(const Buffer& buffer, int src) {
    check(nccl_->recv(buffer.data, buffer.bytes(), bytes_number, src, communicator_,
                      stream_.handle()),
          "ncclRecv");
}

void NcclRank::abort() {
    std::unique_lock<std::shared_timed_mutex> lock(mutex_, std::defer_lock);
    if (is_blocking_) {
        (void)lock.try_lock_for(patience);  // a call that waits in NCCL ends by the abort
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
