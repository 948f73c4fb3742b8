// Asynchronous operations, which one thread runs in the order of the calls.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

namespace tagi_ddp {

class WorkQueue {
 public:
    // Runs the pending operations to their end; to end soon, make them fail first.
    ~WorkQueue();

    // The result is ready once the operation has ended, and holds its error if it failed.
    std::shared_future<void> submit(std::function<void()> operation);
    // True while an operation is pending or running: a blocking call must then queue behind it.
    bool busy() const;

 private:
    struct Pending {
        std::function<void()> operation;
        std::promise<void> result;
    };

    void run();

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Pending> pending_;
    bool running_ = false;
    bool stopping_ = false;
    std::thread thread_;  // started by the first submit
    int process_ = 0;     // the process that has the thread
};

}  // namespace tagi_ddp
