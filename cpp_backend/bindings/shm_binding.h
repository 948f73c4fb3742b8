// The Python face of ShmCommunicator: the methods of tagi_ddp.communicators.Communicator.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "bindings/arguments.h"
#include "common/work_queue.h"
#include "shm/shm_communicator.h"

namespace tagi_ddp {

class PyShmCommunicator {
 public:
    PyShmCommunicator(std::shared_ptr<ShmCommunicator> communicator, double timeout);
    ~PyShmCommunicator();

    int rank() const { return communicator_->rank(); }
    int size() const { return communicator_->size(); }
    double timeout() const { return timeout_; }
    void set_timeout(double seconds) { timeout_ = seconds; }
    double seconds_waited() const { return communicator_->seconds_waited(); }
    ShmCommunicator& get() { return *communicator_; }

    nanobind::object all_reduce(nanobind::handle buffer, nanobind::handle op, nanobind::handle out,
                                bool async_op, nanobind::handle timeout);
    nanobind::object broadcast(nanobind::handle buffer, nanobind::handle root, bool async_op,
                               nanobind::handle timeout);
    nanobind::object all_gather(nanobind::handle buffer, nanobind::handle out,
                                nanobind::handle counts, bool async_op, nanobind::handle timeout);
    nanobind::object reduce_scatter(nanobind::handle buffer, nanobind::handle out,
                                    nanobind::handle counts, nanobind::handle op, bool async_op,
                                    nanobind::handle timeout);
    nanobind::object all_to_all(nanobind::handle buffer, nanobind::handle out,
                                nanobind::handle send_counts, nanobind::handle recv_counts,
                                bool async_op, nanobind::handle timeout);
    nanobind::object send(nanobind::handle buffer, nanobind::handle dst, nanobind::handle tag,
                          bool async_op, nanobind::handle timeout);
    nanobind::object recv(nanobind::handle buffer, nanobind::handle src, nanobind::handle tag,
                          bool async_op, nanobind::handle timeout);
    void barrier(nanobind::handle timeout);
    std::unique_ptr<PyShmCommunicator> split(nanobind::handle color, nanobind::handle key);
    nanobind::object empty(nanobind::handle shape, nanobind::handle dtype);
    void abort(const std::string& reason, const std::vector<int>& ranks);
    void check();
    void close();
    bool failed() const { return communicator_->failed(); }
    const std::string& purpose() const { return purpose_; }
    void set_purpose(std::string purpose) { purpose_ = std::move(purpose); }
    // Tells the others the reason, if there is one, and waits for what is under way.
    void end_with_process(const std::optional<std::string>& reason);

    // Runs a blocking collective behind the asynchronous operations, without the interpreter lock.
    void run_collective(const char* name, const std::function<void()>& operation);
    double seconds(nanobind::handle timeout) const;

 private:
    // Operations that keep the order of their calls, one at a time, whatever the thread.
    struct OperationQueue {
        std::mutex mutex;                        // of the one that runs
        std::atomic<std::thread::id> running{};  // the thread that runs it, if it is a caller's
        std::shared_ptr<WorkQueue> thread = std::make_shared<WorkQueue>();  // none once closed

        bool busy() const { return thread && thread->busy(); }
    };

    // Throws where this thread is in an operation already: a signal handler has called.
    void require_outside(const std::string& name, const OperationQueue& queue) const;
    // Runs `operation` for what is the purpose now.
    std::function<void()> for_purpose(std::function<void()> operation) const;

    void run(OperationQueue& queue, const std::function<void()>& operation);
    nanobind::object start(OperationQueue& queue, const std::string& name,
                           std::function<void()> operation, bool async_op,
                           std::initializer_list<nanobind::handle> arrays);
    nanobind::object start_collective(const char* name, std::function<void()> operation,
                                      bool async_op,
                                      std::initializer_list<nanobind::handle> arrays);

    std::shared_ptr<ShmCommunicator> communicator_;
    double timeout_;
    std::string purpose_;
    // Held while anything but an operation uses the communicator; a signal handler may use it, too.
    std::recursive_mutex open_;
    uint64_t collectives_ = 0;  // called so far, for errors of Work
    OperationQueue operations_;
    OperationQueue
        messages_out_;  // of their own, so that ranks may send to each other, and then receive
};

// Adds ShmCommunicator and Work to the module.
void bind_shm(nanobind::module_& module);

}  // namespace tagi_ddp
