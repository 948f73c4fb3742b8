// What NCCL needs of CUDA: devices, streams and events, by the driver's library, opened at run
// time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "nccl/library.h"

namespace tagi_ddp {

// The driver's functions; each returns its error code. Handles are opaque.
class Cuda {
 public:
    // Throws std::runtime_error if the library cannot be opened or CUDA cannot start.
    explicit Cuda(const std::string& path);

    // Throws std::runtime_error with the driver's text unless `code` is success.
    void check(int code, const char* function) const;

    int driver_version() const;  // 12040 is 12.4
    int device_count() const;

    int (*get_device)(int* device, int ordinal);
    int (*get_device_name)(char* name, int length, int device);
    int (*get_device_attribute)(int* value, int attribute, int device);
    int (*total_memory)(size_t* bytes, int device);
    int (*retain_primary_context)(void** context, int device);
    int (*release_primary_context)(int device);
    int (*push_context)(void* context);
    int (*pop_context)(void** context);
    int (*create_stream)(void** stream, unsigned flags, int priority);
    int (*destroy_stream)(void* stream);
    int (*stream_wait_event)(void* stream, void* event, unsigned flags);
    int (*create_event)(void** event, unsigned flags);
    int (*destroy_event)(void* event);
    int (*record_event)(void* event, void* stream);
    int (*query_event)(void* event);
    int (*pointer_attribute)(void* value, int attribute, unsigned long long pointer);

 private:
    Library library_;
    int (*get_error_name_)(int code, const char** name);
    int (*get_error_string_)(int code, const char** text);
    int (*get_driver_version_)(int* version);
    int (*get_device_count_)(int* count);
};

// A device and its primary context, which torch and the engine use too.
class Device {
 public:
    Device(std::shared_ptr<const Cuda> cuda, int ordinal);
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    ~Device();

    const Cuda& cuda() const { return *cuda_; }
    int ordinal() const { return ordinal_; }
    std::string name() const;
    std::string compute_capability() const;  // "9.0"
    size_t memory() const;                   // bytes
    // The ordinal of the device whose memory `pointer` points to, -1 for the host's.
    int owner_of(uintptr_t pointer) const;

    // Calls the driver's `function` that frees `handle`, wherever that happens; errors are ignored.
    void release(int (*function)(void*), void* handle) const noexcept;

    // Makes the device's context the current one of this thread, until it goes.
    class Guard {
     public:
        explicit Guard(const Device& device);
        Guard(const Guard&) = delete;
        Guard& operator=(const Guard&) = delete;
        ~Guard();

     private:
        const Device& device_;
    };

 private:
    std::shared_ptr<const Cuda> cuda_;
    int ordinal_;
    int device_ = 0;
    void* context_ = nullptr;
};

// A point in a stream.
class Event {
 public:
    explicit Event(std::shared_ptr<const Device> device);
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event();

    void record(void* stream);
    bool complete() const;
    // What `stream` gets from now on comes after this point.
    void order(void* stream) const;

 private:
    std::shared_ptr<const Device> device_;
    void* handle_ = nullptr;
};

// A stream of high priority: other ranks wait for what is in it.
class Stream {
 public:
    explicit Stream(std::shared_ptr<const Device> device);
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream();

    void* handle() const { return handle_; }

 private:
    std::shared_ptr<const Device> device_;
    void* handle_ = nullptr;
};

}  // namespace tagi_ddp
