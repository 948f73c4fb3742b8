#include "common/work_queue.h"

#include <unistd.h>

#include <utility>

namespace tagi_ddp {

bool Work::wait_for(std::chrono::duration<double> limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto step = std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit);
    if (!changed_.wait_for(lock, step, [this] { return done_; })) return false;
    if (error_) std::rethrow_exception(error_);
    return true;
}

void Work::await_end() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
}

bool Work::done() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
}

void Work::finish(std::exception_ptr error) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        done_ = true;
        error_ = std::move(error);
    }
    changed_.notify_all();
}

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

std::shared_ptr<Work> WorkQueue::submit(std::function<void()> operation) {
    auto work = std::make_shared<Work>();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        pending_.emplace_back(std::move(operation), work);
        if (!thread_.joinable()) {
            process_ = getpid();
            thread_ = std::thread(&WorkQueue::run, this);
        }
    }
    changed_.notify_all();
    return work;
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
        auto [operation, work] = std::move(pending_.front());
        pending_.pop_front();
        running_ = true;
        lock.unlock();
        std::exception_ptr error;
        try {
            operation();
        } catch (...) {
            error = std::current_exception();
        }
        operation = nullptr;  // what it holds goes before waiters may look
        lock.lock();
        running_ = false;
        work->finish(std::move(error));
    }
}

}  // namespace tagi_ddp
