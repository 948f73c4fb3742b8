// The interface of every C++ communicator, and of an operation under way.
//
// A communicator is a group of `size` ranks that call the same operations in the same order. Every
// operation waits at most `timeout` seconds and then throws CommunicatorError; after an error the
// communicator is broken and every later operation throws. Counts are in elements.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/errors.h"

namespace tagi_ddp {

// Flat memory of `count` elements.
struct Buffer {
    void* data = nullptr;
    size_t count = 0;
    DType dtype = DType::u8;

    size_t bytes() const { return count * size_of(dtype); }
    std::byte* byte_data() const { return static_cast<std::byte*>(data); }
};

class Communicator {
 public:
    virtual ~Communicator() = default;

    virtual int rank() const = 0;
    virtual int size() const = 0;

    virtual void all_reduce(const Buffer& in, const Buffer& out, ReduceOp op, double timeout) = 0;
    virtual void broadcast(const Buffer& buffer, int root, double timeout) = 0;
    virtual void all_gather(const Buffer& in, const Buffer& out, const std::vector<size_t>& counts,
                            double timeout) = 0;
    virtual void reduce_scatter(const Buffer& in, const Buffer& out,
                                const std::vector<size_t>& counts, ReduceOp op, double timeout) = 0;
    virtual void all_to_all(const Buffer& in, const Buffer& out,
                            const std::vector<size_t>& send_counts,
                            const std::vector<size_t>& recv_counts, double timeout) = 0;
    virtual void send(const Buffer& buffer, int dst, int tag, double timeout) = 0;
    virtual void recv(const Buffer& buffer, int src, int tag, double timeout) = 0;
    virtual void barrier(double timeout) = 0;
    // Null where `color` is negative.
    virtual std::unique_ptr<Communicator> split(int color, int key, double timeout) = 0;
    // Makes every rank's current or next operation fail with `reason`.
    virtual void abort(const std::string& reason) = 0;
    virtual void close() = 0;
};

}  // namespace tagi_ddp
