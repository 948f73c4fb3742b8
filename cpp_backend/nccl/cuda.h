// The parts of CUDA that NCCL needs: devices, streams and events, by the driver's library, which is
// opened at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "nccl/library.h"

namespace tagi_ddp {

// The driver's functions, which return error codes. Handles are opaque.
class Cuda {
    // The functions below are found in it, so it comes first.
    Library library_;
    int (*get_error_name_)(int code, const char** name) = library_.require("cuGetErrorName");
    int (*get_error_string_)(int code, const char** text) = library_.require("cuGetErrorString");
    int (*get_driver_version_)(int* version) = library_.require("cuDriverGetVersion");
    int (*get_device_count_)(int* count) = library_.require("cuDeviceGetCount");

 public:
    // Throws std::runtime_error if the library cannot be opened or CUDA cannot start.
    explicit Cuda(const std::string& path);

    // Throws std::runtime_error with the driver's text unless `code` is success.
    void check(int code, const char* function) const;

    int driver_version() const;  // 12040 is 12.4
    int device_count() const;

    int (*get_device)(int* device, int ordinal) = library_.require("cuDeviceGet");
    int (*get_device_name)(char* name, int length,
                           int device) = library_.require("cuDeviceGetName");
    int (*get_device_attribute)(int* value, int attribute,
                                int device) = library_.require("cuDeviceGetAttribute");
    int (*total_memory)(size_t* bytes, int device) = library_.require("cuDeviceTotalMem_v2");
    int (*retain_primary_context)(void** context,
                                  int device) = library_.require("cuDevicePrimaryCtxRetain");
    int (*release_primary_context)(int device) = library_.require("cuDevicePrimaryCtxRelease_v2");
    int (*push_context)(void* context) = library_.require("cuCtxPushCurrent_v2");
    int (*pop_context)(void** context) = library_.require("cuCtxPopCurrent_v2");
    int (*create_stream)(void** stream, unsigned flags,
                         int priority) = library_.require("cuStreamCreateWithPriority");
    int (*destroy_stream)(void* stream) = library_.require("cuStreamDestroy_v2");
    int (*stream_wait_event)(void* stream, void* event,
                             unsigned flags) = library_.require("cuStreamWaitEvent");
    int (*create_event)(void** event, unsigned flags) = library_.require("cuEventCreate");
    int (*destroy_event)(void* event) = library_.require("cuEventDestroy_v2");
    int (*record_event)(void* event, void* stream) = library_.require("cuEventRecord");
    int (*query_event)(void* event) = library_.require("cuEventQuery");
    int (*pointer_attribute)(void* value, int attribute, unsigned long long pointer) =
        library_.require("cuPointerGetAttribute");
};

// A device and its primary context, which torch and the engine also use.
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
    // The ordinal of the device whose memory `pointer` points to; -1 for host memory.
    int owner_of(uintptr_t pointer) const;

    // Frees `handle` by the driver's `function`, on any thread; ignores errors.
    void release(int (*function)(void*), void* handle) const noexcept;

    // Makes the device's context the current one of this thread until the end of the block.
    class Guard {
     public:
        explicit Guard(const Device& device);
        Guard(const Guard&) = delete;
        ~Guard();

     private:
        const Device& device_;
    };

    // Calls a function of the driver, named `name`, in the device's context; throws its error.
    template <typename... Parameters, typename... Arguments>
    void call(int (*function)(Parameters...), const char* name, Arguments... arguments) const {
        const Guard guard(*this);
        cuda_->check(function(arguments...), name);
    }

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
    // Makes later work of `stream` wait for this point.
    void order(void* stream) const;

 private:
    std::shared_ptr<const Device> device_;
    void* handle_ = nullptr;
};

// A stream of high priority, because other ranks wait for its operations.
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
