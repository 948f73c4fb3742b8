// Asynchronous operations: one thread that runs them in the order of the calls.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace tagi_ddp {

// An operation under way.
class Work {
 public:
    // False when `limit` passed first; throws the operation's error when it failed.
    bool wait_for(std::chrono::duration<double> limit);
    // Returns once it is complete or has failed.
    void await_end();
    bool done() const;

 private:
    friend class WorkQueue;
    void finish(std::exception_ptr error);

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool done_ = false;
    std::exception_ptr error_;
};

class WorkQueue {
 public:
    WorkQueue() = default;
    WorkQueue(const WorkQueue&) = delete;
    WorkQueue& operator=(const WorkQueue&) = delete;
    // Finishes what was submitted; make pending operations fail first to end soon.
    ~WorkQueue();

    std::shared_ptr<Work> submit(std::function<void()> operation);
    // True while an operation waits or runs, so that a blocking call must queue behind it.
    bool busy() const;

 private:
    void run();

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::pair<std::function<void()>, std::shared_ptr<Work>>> pending_;
    bool running_ = false;
    bool stopping_ = false;
    std::thread thread_;  // started by the first submit
    int process_ = 0;     // which has the thread
};

}  // namespace tagi_ddp
