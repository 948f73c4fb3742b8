#include "nccl/cuda.h"

#include <stdexcept>

namespace tagi_ddp {
namespace {

// Values of the driver's interface.
constexpr int success = 0, not_ready = 600;
constexpr int capability_major = 75, capability_minor = 76;
constexpr int attribute_memory_type = 2, attribute_ordinal = 9;
constexpr unsigned device_memory = 2;
constexpr unsigned non_blocking_stream = 1, event_without_timing = 2;
constexpr int high_priority = -1;

}  // namespace

Cuda::Cuda(const std::string& path) : library_(path) {
    int (*start)(unsigned flags) = nullptr;
    library_.get(start, "cuInit");
    library_.get(get_error_name_, "cuGetErrorName");
    library_.get(get_error_string_, "cuGetErrorString");
    library_.get(get_driver_version_, "cuDriverGetVersion");
    library_.get(get_device_count_, "cuDeviceGetCount");
    library_.get(get_device, "cuDeviceGet");
    library_.get(get_device_name, "cuDeviceGetName");
    library_.get(get_device_attribute, "cuDeviceGetAttribute");
    library_.get(total_memory, "cuDeviceTotalMem_v2");
    library_.get(retain_primary_context, "cuDevicePrimaryCtxRetain");
    library_.get(release_primary_context, "cuDevicePrimaryCtxRelease_v2");
    library_.get(push_context, "cuCtxPushCurrent_v2");
    library_.get(pop_context, "cuCtxPopCurrent_v2");
    library_.get(create_stream, "cuStreamCreateWithPriority");
    library_.get(destroy_stream, "cuStreamDestroy_v2");
    library_.get(stream_wait_event, "cuStreamWaitEvent");
    library_.get(create_event, "cuEventCreate");
    library_.get(destroy_event, "cuEventDestroy_v2");
    library_.get(record_event, "cuEventRecord");
    library_.get(query_event, "cuEventQuery");
    library_.get(pointer_attribute, "cuPointerGetAttribute");
    check(start(0), "cuInit");
}

void Cuda::check(int code, const char* function) const {
    if (code == success) return;
    const char* name = nullptr;
    const char* text = nullptr;
    get_error_name_(code, &name);
    get_error_string_(code, &text);
    throw std::runtime_error(std::string(function) + ": " +
                             (name == nullptr ? "error " + std::to_string(code) : name) +
                             (text == nullptr ? "" : std::string(", ") + text));
}

int Cuda::driver_version() const {
    int version = 0;
    check(get_driver_version_(&version), "cuDriverGetVersion");
    return version;
}

int Cuda::device_count() const {
    int count = 0;
    check(get_device_count_(&count), "cuDeviceGetCount");
    return count;
}

Device::Device(std::shared_ptr<const Cuda> cuda, int ordinal)
    : cuda_(std::move(cuda)), ordinal_(ordinal) {
    cuda_->check(cuda_->get_device(&device_, ordinal), "cuDeviceGet");
    cuda_->check(cuda_->retain_primary_context(&context_, device_), "cuDevicePrimaryCtxRetain");
}

Device::~Device() { cuda_->release_primary_context(device_); }

std::string Device::name() const {
    char name[256] = {};
    cuda_->check(cuda_->get_device_name(name, sizeof name, device_), "cuDeviceGetName");
    return name;
}

std::string Device::compute_capability() const {
    int major = 0;
    int minor = 0;
    cuda_->check(cuda_->get_device_attribute(&major, capability_major, device_),
                 "cuDeviceGetAttribute");
    cuda_->check(cuda_->get_device_attribute(&minor, capability_minor, device_),
                 "cuDeviceGetAttribute");
    return std::to_string(major) + "." + std::to_string(minor);
}

size_t Device::memory() const {
    size_t bytes = 0;
    cuda_->check(cuda_->total_memory(&bytes, device_), "cuDeviceTotalMem");
    return bytes;
}

int Device::owner_of(uintptr_t pointer) const {
    const Guard guard(*this);
    unsigned type = 0;
    // The driver answers with an error for memory that it does not know.
    if (cuda_->pointer_attribute(&type, attribute_memory_type, pointer) != success) return -1;
    if (type != device_memory) return -1;
    int owner = -1;
    cuda_->check(cuda_->pointer_attribute(&owner, attribute_ordinal, pointer),
                 "cuPointerGetAttribute");
    return owner;
}

void Device::release(int (*function)(void*), void* handle) const noexcept {
    if (handle == nullptr || cuda_->push_context(context_) != success) return;
    function(handle);
    void* context = nullptr;
    cuda_->pop_context(&context);
}

Device::Guard::Guard(const Device& device) : device_(device) {
    const Cuda& cuda = device.cuda();
    cuda.check(cuda.push_context(device.context_), "cuCtxPushCurrent");
}

Device::Guard::~Guard() {
    void* context = nullptr;
    device_.cuda().pop_context(&context);
}

Event::Event(std::shared_ptr<const Device> device) : device_(std::move(device)) {
    const Device::Guard guard(*device_);
    const Cuda& cuda = device_->cuda();
    cuda.check(cuda.create_event(&handle_, event_without_timing), "cuEventCreate");
}

Event::~Event() { device_->release(device_->cuda().destroy_event, handle_); }

void Event::record(void* stream) {
    const Device::Guard guard(*device_);
    device_->cuda().check(device_->cuda().record_event(handle_, stream), "cuEventRecord");
}

bool Event::complete() const {
    const Device::Guard guard(*device_);
    const int code = device_->cuda().query_event(handle_);
    if (code == not_ready) return false;
    device_->cuda().check(code, "cuEventQuery");
    return true;
}

void Event::order(void* stream) const {
    const Device::Guard guard(*device_);
    const Cuda& cuda = device_->cuda();
    cuda.check(cuda.stream_wait_event(stream, handle_, 0), "cuStreamWaitEvent");
}

Stream::Stream(std::shared_ptr<const Device> device) : device_(std::move(device)) {
    const Device::Guard guard(*device_);
    const Cuda& cuda = device_->cuda();
    cuda.check(cuda.create_stream(&handle_, non_blocking_stream, high_priority),
               "cuStreamCreateWithPriority");
}

Stream::~Stream() { device_->release(device_->cuda().destroy_stream, handle_); }

}  // namespace tagi_ddp
