#include "common/work_queue.h"

#include <unistd.h>

#include <exception>
#include <utility>

namespace tagi_ddp {

WorkQueue::~WorkQueue() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    if (!thread_.joinable()) return;
    if (getpid() == process_) {
        thread_.join();
    } else {
        thread_.detach();  // a fork has no such thread
    }
}

std::shared_future<void> WorkQueue::submit(std::function<void()> operation) {
    Pending pending{std::move(operation), {}};
    std::shared_future<void> result = pending.result.get_future();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        pending_.push_back(std::move(pending));
        if (!thread_.joinable()) {
            process_ = getpid();
            thread_ = std::thread(&WorkQueue::run, this);
        }
    }
    changed_.notify_all();
    return result;
}

bool WorkQueue::busy() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return running_ || !pending_.empty();
}

void WorkQueue::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
        if (pending_.empty()) return;
        Pending current = std::move(pending_.front());
        pending_.pop_front();
        running_ = true;
        lock.unlock();
        std::exception_ptr error;
        try {
            current.operation();
        } catch (...) {
            error = std::current_exception();
        }
        current.operation = nullptr;  // frees what it holds before a waiter can see the end
        lock.lock();
        running_ = false;
        if (error) {
            current.result.set_exception(std::move(error));
        } else {
            current.result.set_value();
        }
    }
}

}  // namespace tagi_ddp
