// A communicator of the stand-in for libnccl: who it connects, and what it still has to do.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common.h"
#include "mesh.h"
#include "reduce.h"

namespace stand_in {

// NCCL's result codes.
constexpr int success = 0, unhandled_cuda = 1, system_failure = 2, invalid_argument = 4;
constexpr int invalid_usage = 5, remote_failure = 6, in_progress = 7;

enum class Kind {
    all_reduce,
    broadcast,
    reduce,
    reduce_scatter,
    all_gather,
    all_to_all,
    send,
    recv
};

struct Operation {
    Kind kind;
    const void* in;
    void* out;
    size_t count;
    int dtype;
    int op;
    int root;  // or the peer
    void* stream;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
    Communicator(const std::string& id, int rank, int size, int device, bool blocking)
        : rank(rank),
          size(size),
          device(device),
          blocking(blocking),
          id_(id),
          mesh_(id, rank, size, aborted_) {}

    // What the communicator runs at its turn. Its first stream runs it, the others wait for that.
    struct Batch {
        std::shared_ptr<Communicator> communicator;
        std::vector<Operation> operations;
        std::vector<void*> streams;
        size_t ticket;
        bool reports_loss;
        Fault fault = {};
        size_t streams_waiting = 0;
        bool over = false;
    };

    // An error stays.
    int state() {
        const std::lock_guard lock(mutex_);
        return error_ != success ? error_ : background_ > 0 || stays_ ? in_progress : success;
    }

    // "In progress" until `leave`, for a thread that works for the communicator.
    void enter() {
        const std::lock_guard lock(mutex_);
        ++background_;
    }

    // With "in progress" as its result, that stays.
    void leave(int result) {
        const std::lock_guard lock(mutex_);
        if (result == in_progress) {
            stays_ = true;
        } else if (result != success) {
            error_ = result;
        }
        --background_;
        changed_.notify_all();
    }

    // "In progress" until `work` returns its result, on a thread of its own.
    void in_background(std::function<int()> work) {
        enter();
        std::thread([self = shared_from_this(), work = std::move(work)] {
            self->leave(work());
        }).detach();
    }

    int connect() {
        try {
            return mesh_.connect() == Mesh::Result::done ? success : in_progress;
        } catch (const std::system_error&) {
            return system_failure;
        }
    }

    // A communicator of the same ranks, which connects while this one is "in progress".
    std::shared_ptr<Communicator> split(bool blocking) {
        const std::lock_guard lock(mutex_);
        const std::string name = id_ + "/" + std::to_string(parts_.size());
        return parts_.emplace_back(
            std::make_shared<Communicator>(name, rank, size, device, blocking));
    }

    // Until an abort.
    void wait_for_abort() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return bool(aborted_); });
    }

    bool finalized() const { return finalized_; }

    // The place of the next batch in the order of the calls.
    size_t draw_ticket() {
        const std::lock_guard lock(mutex_);
        return tickets_++;
    }

    // Until all batches are over. Returns false if aborted.
    bool drain() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return aborted_ || turn_ == tickets_; });
        return !aborted_;
    }

    // No more operations; "in progress" until those given are over.
    int finalize(const Fault& fault) {
        if (state() == in_progress) return invalid_usage;
        finalized_ = true;
        in_background([this, fault] {
            const bool done = drain();
            if (fault.kind == Fault::Kind::async) return fault.number;
            return done && fault.kind == Fault::Kind::none ? success : in_progress;
        });
        return in_progress;
    }

    // Ends all waits; afterwards no memory of the caller is touched.
    void abort() {
        std::unique_lock lock(mutex_);
        aborted_ = true;
        if (background_ > 0) {
            for (const auto& part : parts_) part->aborted_ = true;  // so that it stops connecting
        }
        changed_.notify_all();
        changed_.wait(lock, [&] { return background_ == 0 && !running_; });
        mesh_.close();
    }

    // In stream number `stream` of the batch, on that stream's thread.
    void run(Batch& batch, size_t stream) {
        std::unique_lock lock(mutex_);
        if (stream > 0) {
            ++batch.streams_waiting;
            changed_.notify_all();
            changed_.wait(lock, [&] { return aborted_ || batch.over; });
            return;
        }
        changed_.wait(lock, [&] {
            return aborted_ ||
                   (turn_ == batch.ticket && batch.streams_waiting + 1 == batch.streams.size());
        });
        if (aborted_) return;
        running_ = true;
        lock.unlock();
        const bool faulty = batch.fault.kind != Fault::Kind::none;
        const Mesh::Result result = faulty ? Mesh::Result::stuck : run_all(batch.operations);
        lock.lock();
        if (result == Mesh::Result::lost && batch.reports_loss) error_ = remote_failure;
        if (batch.fault.kind == Fault::Kind::async) error_ = batch.fault.number;
        running_ = false;
        if (result == Mesh::Result::done) {
            ++turn_;
            batch.over = true;
        }
        changed_.notify_all();
        changed_.wait(lock, [&] { return aborted_ || batch.over; });
    }

    const int rank;
    const int size;
    const int device;
    const bool blocking;

 private:
    // Collectives in their order, then what is sent and received, all at once.
    Mesh::Result run_all(const std::vector<Operation>& operations) {
        std::vector<Transfer> messages;
        for (const Operation& operation : operations) {
            if (operation.kind == Kind::send || operation.kind == Kind::recv) {
                messages.push_back(message(operation));
                continue;
            }
            if (operation.count == 0) continue;
            const Mesh::Result result = run_collective(operation);
            if (result != Mesh::Result::done) return result;
        }
        return mesh_.exchange(messages);
    }

    static std::byte* bytes_of(const void* memory) {
        return static_cast<std::byte*>(const_cast<void*>(memory));
    }

    static Transfer message(const Operation& operation) {
        const bool sends = operation.kind == Kind::send;
        const Header header{operation.count, int32_t(Kind::send), operation.dtype, 0, 0};
        return {operation.root, sends, header, bytes_of(sends ? operation.in : operation.out),
                operation.count * size_of(operation.dtype)};
    }

    Mesh::Result run_collective(const Operation& o) {
        const Header header{o.count, int32_t(o.kind), o.dtype, o.op, o.root};
        const size_t bytes = o.count * size_of(o.dtype);
        std::byte* const in = bytes_of(o.in);
        std::byte* const out = bytes_of(o.out);
        const bool is_root = rank == o.root;
        const bool rooted = o.kind == Kind::broadcast || o.kind == Kind::reduce;
        const bool in_parts = o.kind == Kind::reduce_scatter || o.kind == Kind::all_to_all;
        const bool out_parts = o.kind == Kind::all_gather || o.kind == Kind::all_to_all;
        const bool reduces = o.kind != Kind::broadcast && !out_parts;

        std::vector<std::vector<std::byte>> received(reduces ? size_t(size) : 0);
        std::vector<const std::byte*> inputs(received.size());
        std::vector<Transfer> transfers;
        for (int peer = 0; peer < size; ++peer) {
            const size_t part = size_t(peer) * bytes;
            std::byte* const source = in_parts ? in + part : in;
            std::byte* target = out_parts ? out + part : out;
            const bool to_peer = !rooted || (o.kind == Kind::broadcast ? is_root : peer == o.root);
            const bool from_peer =
                !rooted || (o.kind == Kind::broadcast ? peer == o.root : is_root);
            if (reduces && peer == rank) {
                inputs[size_t(peer)] = source;
                continue;
            }
            if (reduces && from_peer) {
                received[size_t(peer)].resize(bytes);
                inputs[size_t(peer)] = target = received[size_t(peer)].data();
            }
            if (to_peer) transfers.push_back({peer, true, header, source, bytes});
            if (from_peer) transfers.push_back({peer, false, header, target, bytes});
        }
        const Mesh::Result result = mesh_.exchange(transfers);
        if (result == Mesh::Result::done && reduces && (!rooted || is_root)) {
            reduce(o.dtype, o.op, inputs, out, o.count);
        }
        return result;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    int error_ = success;
    bool stays_ = false;  // in progress
    int background_ = 0;  // threads that still work for the communicator
    bool running_ = false;
    size_t tickets_ = 0;
    size_t turn_ = 0;
    std::atomic<bool> finalized_{false};
    std::atomic<bool> aborted_{false};
    const std::string id_;
    std::vector<std::shared_ptr<Communicator>> parts_;
    Mesh mesh_;
};

}  // namespace stand_in
