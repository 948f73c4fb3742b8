// Streams and events of the stand-in for libcuda.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "common.h"

namespace stand_in {

// Reached when the work before it in its stream is done.
class Point {
 public:
    void reach() {
        const std::lock_guard lock(mutex_);
        reached_ = true;
        changed_.notify_all();
    }

    void wait() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return reached_; });
    }

    bool reached() {
        const std::lock_guard lock(mutex_);
        return reached_;
    }

 private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool reached_ = false;
};

// Runs what it is given in order, on a thread of its own that ends after `close` and all work.
class Stream {
 public:
    explicit Stream(int device) : device(device) {}

    static std::shared_ptr<Stream> start(int device) {
        auto stream = std::make_shared<Stream>(device);
        std::thread([stream] { stream->run(); }).detach();
        return stream;
    }

    void put(std::function<void()> work) {
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(work));
        changed_.notify_all();
    }

    std::shared_ptr<Point> mark() {
        auto point = std::make_shared<Point>();
        put([point] { point->reach(); });
        return point;
    }

    void close() {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        changed_.notify_all();
    }

    const int device;

 private:
    void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
            if (queue_.empty()) return;
            const std::function<void()> work = std::move(queue_.front());
            queue_.pop_front();
            lock.unlock();
            dawdle();
            work();
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    bool closing_ = false;
};

class Event {
 public:
    explicit Event(int device) : device(device) {}

    void record(Stream& stream) {
        const std::lock_guard lock(mutex_);
        point_ = stream.mark();
    }

    // Null if never recorded, which counts as complete.
    std::shared_ptr<Point> point() {
        const std::lock_guard lock(mutex_);
        return point_;
    }

    const int device;

 private:
    std::mutex mutex_;
    std::shared_ptr<Point> point_;
};

}  // namespace stand_in
