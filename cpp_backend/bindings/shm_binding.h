// ShmCommunicator for Python, with the methods of tagi_ddp.communicators.Communicator.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/work_queue.h"
#include "shm/shm_communicator.h"

namespace tagi_ddp {

// Runs operations in the order of their calls, one at a time, whatever thread calls them.
class PyShmCommunicator {
 public:
    // An operation gets its timeout in seconds.
    using Operation = std::function<void(ShmCommunicator&, double timeout)>;

    PyShmCommunicator(std::shared_ptr<ShmCommunicator> communicator, double timeout);
    ~PyShmCommunicator();

    int rank() const { return communicator_->rank(); }
    int size() const { return communicator_->size(); }
    const ShmCommunicator& get() const { return *communicator_; }

    // Both release the interpreter lock, and return None once the operation is complete. If
    // `async_op`, they return a Work at once, which keeps `arrays` alive. None is the default
    // timeout.
    nanobind::object collective(const char* name, bool async_op, nanobind::handle timeout,
                                std::initializer_list<nanobind::handle> arrays,
                                Operation operation);
    nanobind::object message(bool outgoing, int peer, bool async_op, nanobind::handle timeout,
                             nanobind::handle array, Operation operation);

    void abort(const std::string& reason, const std::vector<int>& ranks);
    void check();
    void close();
    // Aborts with the reason, if there is one, and waits for pending operations.
    void end_with_process(const std::optional<std::string>& reason);

    double timeout = 0;   // in seconds, the default of operations
    std::string purpose;  // of the next collectives

 private:
    // Operations that run one at a time.
    struct OperationQueue {
        std::mutex mutex;                        // held by the operation that runs
        std::atomic<std::thread::id> running{};  // the caller's thread, if it runs an operation
        std::shared_ptr<WorkQueue> thread = std::make_shared<WorkQueue>();  // null once closed

        bool busy() const { return thread && thread->busy(); }
    };

    // Throws if this thread is inside an operation, because a signal handler has called another.
    void require_outside(const std::string& name, const OperationQueue& queue) const;
    std::string where(const std::string& name) const;
    // Binds an operation to its timeout, and a collective to the current purpose too.
    std::function<void()> bound(Operation operation, nanobind::handle timeout,
                                bool is_collective) const;
    void run(OperationQueue& queue, const std::function<void()>& operation);
    nanobind::object start(OperationQueue& queue, const std::string& name,
                           std::function<void()> operation, bool async_op,
                           std::initializer_list<nanobind::handle> arrays);

    std::shared_ptr<ShmCommunicator> communicator_;
    // Held by calls that are no operations. Recursive, because a signal handler may make them too.
    std::recursive_mutex open_;
    uint64_t collectives_ = 0;  // the number of calls, for errors of Work
    OperationQueue operations_;
    OperationQueue sends_;  // apart from the others: ranks may send to each other, then receive
};

}  // namespace tagi_ddp
