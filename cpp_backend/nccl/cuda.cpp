#include "nccl/cuda.h"

#include <stdexcept>

namespace tagi_ddp {
namespace {

// Constants of the driver's interface.
constexpr int success = 0, not_ready = 600;
constexpr int capability_major = 75, capability_minor = 76;
constexpr int attribute_memory_type = 2, attribute_ordinal = 9;
constexpr unsigned device_memory = 2;
constexpr unsigned non_blocking_stream = 1, event_without_timing = 2;
constexpr int high_priority = -1;

}  // namespace

Cuda::Cuda(const std::string& path) : library_(path) {
    int (*start)(unsigned flags) = library_.require("cuInit");
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
    // The driver returns an error for memory that it does not know.
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
    device_->call(device_->cuda().create_event, "cuEventCreate", &handle_, event_without_timing);
}

Event::~Event() { device_->release(device_->cuda().destroy_event, handle_); }

void Event::record(void* stream) {
    device_->call(device_->cuda().record_event, "cuEventRecord", handle_, stream);
}

bool Event::complete() const {
    const Device::Guard guard(*device_);
    const int code = device_->cuda().query_event(handle_);
    if (code == not_ready) return false;
    device_->cuda().check(code, "cuEventQuery");
    return true;
}

void Event::order(void* stream) const {
    device_->call(device_->cuda().stream_wait_event, "cuStreamWaitEvent", stream, handle_, 0);
}

Stream::Stream(std::shared_ptr<const Device> device) : device_(std::move(device)) {
    device_->call(device_->cuda().create_stream, "cuStreamCreateWithPriority", &handle_,
                  non_blocking_stream, high_priority);
}

Stream::~Stream() { device_->release(device_->cuda().destroy_stream, handle_); }

}  // namespace tagi_ddp
