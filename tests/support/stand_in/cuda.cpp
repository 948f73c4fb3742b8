// A stand-in for libcuda: devices, contexts, streams and events in host memory. Streams run
// asynchronously and late, so that what waits for too little shows.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <vector>

#include "common.h"
#include "stream.h"

namespace stand_in {
namespace {

// Values of the driver's interface.
constexpr int success = 0, invalid_value = 1, not_initialized = 3, no_device = 100;
constexpr int invalid_device = 101, invalid_context = 201, invalid_handle = 400, not_ready = 600;
constexpr int capability_major = 75;
constexpr int attribute_memory_type = 2, attribute_ordinal = 9;
constexpr unsigned device_memory = 2;

struct Context {
    std::atomic<int> retained{0};
};
using Contexts = std::array<Context, 64>;

// Device memory by its address.
struct Memory {
    std::mutex mutex;
    std::map<unsigned long long, std::unique_ptr<std::byte[]>> blocks;
};

std::atomic<bool> started{false};
thread_local std::vector<int> current;  // the devices of this thread's contexts

// The default stream, which orders nothing but what is put in it.
std::shared_ptr<Stream> default_stream() {
    struct Default {
        std::shared_ptr<Stream> stream = Stream::start(0);
    };
    return immortal<Default>().stream;
}

std::shared_ptr<Stream> find_stream(void* handle) {
    return handle == nullptr ? default_stream() : immortal<Registry<Stream>>().find(handle);
}

std::shared_ptr<Event> find_event(void* handle) { return immortal<Registry<Event>>().find(handle); }

int device_count() {
    const char* variable = std::getenv("TAGI_DDP_STAND_IN_DEVICES");
    return variable == nullptr ? 4 : std::min(std::atoi(variable), 64);
}

enum class Needs { nothing, start, context };

// The code with which the call ends at once: injected, or because it came too early.
int enter(const char* function, Needs needs) {
    const Fault fault = find_fault(function);
    if (fault.kind == Fault::Kind::code) return fault.number;
    if (needs != Needs::nothing && !started) return not_initialized;
    if (needs == Needs::context && current.empty()) return invalid_context;
    return success;
}

int enter(const char* function, Needs needs, int device) {
    if (const int code = enter(function, needs)) return code;
    return device >= 0 && device < device_count() ? success : invalid_device;
}

void* pointer(unsigned long long address) { return reinterpret_cast<void*>(address); }

// As the driver's synchronous copies: in the default stream, and back when done.
void copy_now(void* to, const void* from, size_t bytes) {
    const auto stream = default_stream();
    stream->put([=] { std::memcpy(to, from, bytes); });
    stream->mark()->wait();
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

STAND_IN_API int cuInit(unsigned) {
    if (const int code = enter(__func__, Needs::nothing)) return code;
    if (device_count() <= 0) return no_device;
    started = true;
    return success;
}

STAND_IN_API int cuDriverGetVersion(int* version) {
    const Fault fault = find_fault(__func__, {Fault::Kind::value});
    if (fault.kind == Fault::Kind::code) return fault.number;
    *version = fault.kind == Fault::Kind::value ? fault.number : 12040;
    return success;
}

STAND_IN_API int cuGetErrorName(int error, const char** name) {
    if (const int code = enter(__func__, Needs::nothing)) return code;
    static const std::map<int, const char*> names{{success, "CUDA_SUCCESS"},
                                                  {invalid_value, "CUDA_ERROR_INVALID_VALUE"},
                                                  {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                  {not_initialized, "CUDA_ERROR_NOT_INITIALIZED"},
                                                  {no_device, "CUDA_ERROR_NO_DEVICE"},
                                                  {invalid_device, "CUDA_ERROR_INVALID_DEVICE"},
                                                  {invalid_context, "CUDA_ERROR_INVALID_CONTEXT"},
                                                  {invalid_handle, "CUDA_ERROR_INVALID_HANDLE"},
                                                  {not_ready, "CUDA_ERROR_NOT_READY"},
                                                  {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                  {719, "CUDA_ERROR_LAUNCH_FAILED"},
                                                  {999, "CUDA_ERROR_UNKNOWN"}};
    const auto found = names.find(error);
    *name = found == names.end() ? nullptr : found->second;
    return found == names.end() ? invalid_value : success;
}

STAND_IN_API int cuGetErrorString(int error, const char** text) {
    if (const int code = enter(__func__, Needs::nothing)) return code;
    const char* name = nullptr;
    if (cuGetErrorName(error, &name) != success) {
        *text = nullptr;
        return invalid_value;
    }
    *text = error == success ? "no error" : "an error of the stand-in";
    return success;
}

STAND_IN_API int cuDeviceGetCount(int* count) {
    if (const int code = enter(__func__, Needs::start)) return code;
    *count = device_count();
    return success;
}

STAND_IN_API int cuDeviceGet(int* device, int ordinal) {
    if (const int code = enter(__func__, Needs::start, ordinal)) return code;
    *device = ordinal;
    return success;
}

STAND_IN_API int cuDeviceGetName(char* name, int length, int device) {
    if (const int code = enter(__func__, Needs::start, device)) return code;
    std::snprintf(name, static_cast<size_t>(length), "stand-in");
    return success;
}

STAND_IN_API int cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (const int code = enter(__func__, Needs::start, device)) return code;
    *value = attribute == capability_major ? 9 : 0;
    return success;
}

STAND_IN_API int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    if (const int code = enter(__func__, Needs::start, device)) return code;
    *bytes = size_t{1} << 34;
    return success;
}

STAND_IN_API int cuDevicePrimaryCtxRetain(void** context, int device) {
    if (const int code = enter(__func__, Needs::start, device)) return code;
    Context& retained = immortal<Contexts>()[static_cast<size_t>(device)];
    ++retained.retained;
    *context = &retained;
    return success;
}

STAND_IN_API int cuDevicePrimaryCtxRelease_v2(int device) {
    if (const int code = enter(__func__, Needs::start, device)) return code;
    Context& context = immortal<Contexts>()[static_cast<size_t>(device)];
    if (--context.retained >= 0) return success;
    ++context.retained;
    return invalid_context;
}

STAND_IN_API int cuCtxPushCurrent_v2(void* context) {
    if (const int code = enter(__func__, Needs::start)) return code;
    Contexts& contexts = immortal<Contexts>();
    for (size_t device = 0; device < contexts.size(); ++device) {
        if (&contexts[device] != context || contexts[device].retained <= 0) continue;
        current.push_back(static_cast<int>(device));
        return success;
    }
    return invalid_context;
}

STAND_IN_API int cuCtxPopCurrent_v2(void** context) {
    if (const int code = enter(__func__, Needs::context)) return code;
    *context = &immortal<Contexts>()[static_cast<size_t>(current.back())];
    current.pop_back();
    return success;
}

STAND_IN_API int cuStreamCreateWithPriority(void** handle, unsigned, int) {
    if (const int code = enter(__func__, Needs::context)) return code;
    *handle = immortal<Registry<Stream>>().add(Stream::start(current.back()));
    return success;
}

STAND_IN_API int cuStreamDestroy_v2(void* handle) {
    if (const int code = enter(__func__, Needs::start)) return code;
    const auto stream = immortal<Registry<Stream>>().remove(handle);
    if (stream == nullptr) return invalid_handle;
    stream->close();
    return success;
}

STAND_IN_API int cuStreamWaitEvent(void* stream_handle, void* event_handle, unsigned) {
    if (const int code = enter(__func__, Needs::context)) return code;
    const auto stream = find_stream(stream_handle);
    const auto event = find_event(event_handle);
    if (stream == nullptr || event == nullptr) return invalid_handle;
    if (const auto point = event->point()) stream->put([point] { point->wait(); });
    return success;
}

STAND_IN_API int cuStreamSynchronize(void* handle) {
    if (const int code = enter(__func__, Needs::context)) return code;
    const auto stream = find_stream(handle);
    if (stream == nullptr) return invalid_handle;
    stream->mark()->wait();
    return success;
}

STAND_IN_API int cuEventCreate(void** handle, unsigned) {
    if (const int code = enter(__func__, Needs::context)) return code;
    *handle = immortal<Registry<Event>>().add(std::make_shared<Event>(current.back()));
    return success;
}

STAND_IN_API int cuEventDestroy_v2(void* handle) {
    if (const int code = enter(__func__, Needs::start)) return code;
    return immortal<Registry<Event>>().remove(handle) == nullptr ? invalid_handle : success;
}

STAND_IN_API int cuEventRecord(void* event_handle, void* stream_handle) {
    if (const int code = enter(__func__, Needs::context)) return code;
    const auto stream = find_stream(stream_handle);
    const auto event = find_event(event_handle);
    if (stream == nullptr || event == nullptr) return invalid_handle;
    const int device = stream_handle == nullptr ? current.back() : stream->device;
    if (event->device != device) return invalid_handle;
    event->record(*stream);
    return success;
}

STAND_IN_API int cuEventQuery(void* handle) {
    if (const int code = enter(__func__, Needs::start)) return code;
    const auto event = find_event(handle);
    if (event == nullptr) return invalid_handle;
    const auto point = event->point();
    return point == nullptr || point->reached() ? success : not_ready;
}

STAND_IN_API int cuEventSynchronize(void* handle) {
    if (const int code = enter(__func__, Needs::context)) return code;
    const auto event = find_event(handle);
    if (event == nullptr) return invalid_handle;
    if (const auto point = event->point()) point->wait();
    return success;
}

// All memory counts as the current device's.
STAND_IN_API int cuPointerGetAttribute(void* value, int attribute, unsigned long long address) {
    if (const int code = enter(__func__, Needs::start)) return code;
    if (address == 0) return invalid_value;
    if (attribute == attribute_memory_type) {
        *static_cast<unsigned*>(value) = device_memory;
    } else if (attribute == attribute_ordinal) {
        *static_cast<int*>(value) = current.empty() ? 0 : current.back();
    } else {
        return invalid_value;
    }
    return success;
}

STAND_IN_API int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
    if (const int code = enter(__func__, Needs::context)) return code;
    if (bytes == 0) return invalid_value;
    auto block = std::make_unique<std::byte[]>(bytes);
    *address = reinterpret_cast<unsigned long long>(block.get());
    Memory& memory = immortal<Memory>();
    const std::lock_guard lock(memory.mutex);
    memory.blocks[*address] = std::move(block);
    return success;
}

STAND_IN_API int cuMemFree_v2(unsigned long long address) {
    if (const int code = enter(__func__, Needs::context)) return code;
    Memory& memory = immortal<Memory>();
    const std::lock_guard lock(memory.mutex);
    return memory.blocks.erase(address) == 0 ? invalid_value : success;
}

STAND_IN_API int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes,
                               void* handle) {
    if (const int code = enter(__func__, Needs::context)) return code;
    const auto stream = find_stream(handle);
    if (stream == nullptr) return invalid_handle;
    stream->put([=] { std::memcpy(pointer(to), pointer(from), bytes); });
    return success;
}

STAND_IN_API int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t bytes) {
    if (const int code = enter(__func__, Needs::context)) return code;
    copy_now(to, pointer(from), bytes);
    return success;
}

STAND_IN_API int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) {
    if (const int code = enter(__func__, Needs::context)) return code;
    copy_now(pointer(to), from, bytes);
    return success;
}

// For the stand-in of libnccl: runs `run(argument)` in the stream.
STAND_IN_API int standInEnqueue(void* handle, void (*run)(void*), void* argument) {
    const auto stream = find_stream(handle);
    if (stream == nullptr) return invalid_handle;
    stream->put([=] { run(argument); });
    return success;
}

// The device of a stream, or of this thread's context if it is null; -1 if there is none.
STAND_IN_API int standInDevice(void* handle) {
    if (handle == nullptr) return current.empty() ? -1 : current.back();
    const auto stream = find_stream(handle);
    return stream == nullptr ? -1 : stream->device;
}
