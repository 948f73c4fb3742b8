// Where the fields of the engine's CUDA objects lie (pytagi 0.2.1 and its source of January 2026,
// x86-64), and of what class an object is.
//
// As in layer_layout.h, an assumption about somebody else's binary: tagi_ddp.replica.cuda
// verifies it before a pointer is used.
#pragma once

#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "engine/layer_layout.h"

namespace tagi_ddp {

struct EngineCudaLayer {
    EngineLayer base;
    // On the device: mu_w, var_w, mu_b, var_b and their deltas.
    float* parameters[4];
    float* deltas[4];
    int32_t* neg_var_count;
    uint32_t num_cuda_threads;

    EngineCudaLayer() = delete;
    ~EngineCudaLayer() = delete;
};

static_assert(std::is_standard_layout_v<EngineCudaLayer>);
static_assert(offsetof(EngineCudaLayer, parameters) == 344 &&
              offsetof(EngineCudaLayer, deltas) == 376 &&
              offsetof(EngineCudaLayer, neg_var_count) == 408 &&
              offsetof(EngineCudaLayer, num_cuda_threads) == 416);

// What a std::shared_ptr to a layer is made of.
struct EngineLayerPointer {
    void* layer;
    void* control;
};

// A block of layers is not of the CUDA classes itself.
struct EngineLayerBlock {
    std::byte base[sizeof(EngineLayer)];
    std::vector<EngineLayerPointer> layers;

    EngineLayerBlock() = delete;
    ~EngineLayerBlock() = delete;
};

static_assert(sizeof(std::vector<EngineLayerPointer>) == 24);
static_assert(offsetof(EngineLayerBlock, layers) == 344);

struct EngineCudaResNetBlock {
    std::byte base[sizeof(EngineCudaLayer)];
    EngineLayerPointer main_block, shortcut;

    EngineCudaResNetBlock() = delete;
    ~EngineCudaResNetBlock() = delete;
};

static_assert(offsetof(EngineCudaResNetBlock, main_block) == 424 &&
              offsetof(EngineCudaResNetBlock, shortcut) == 440);

struct EngineCudaBatchNorm {
    // Not sizeof(EngineCudaLayer): the class that is derived from it uses its last four bytes.
    std::byte base[offsetof(EngineCudaLayer, num_cuda_threads) + sizeof(uint32_t)];
    int32_t num_features;
    std::vector<float> mu_ra, var_ra, mu_norm_batch, var_norm_batch;
    float *device_mu_ra, *device_var_ra, *device_mu_norm_batch, *device_var_norm_batch;
    float epsilon, momentum, gain_w, gain_b;
    bool first_batch;

    EngineCudaBatchNorm() = delete;
    ~EngineCudaBatchNorm() = delete;
};

static_assert(offsetof(EngineCudaBatchNorm, num_features) == 420 &&
              offsetof(EngineCudaBatchNorm, mu_ra) == 424 &&
              offsetof(EngineCudaBatchNorm, device_mu_ra) == 520 &&
              offsetof(EngineCudaBatchNorm, epsilon) == 552 &&
              offsetof(EngineCudaBatchNorm, first_batch) == 568);

// Whether this process may read the bytes, a few thousand at most; the kernel knows.
inline bool is_readable(uintptr_t address, size_t size) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        throw std::system_error(errno, std::generic_category(), "pipe2");
    }
    const ssize_t written = write(ends[1], reinterpret_cast<const void*>(address), size);
    close(ends[0]);
    close(ends[1]);
    return written == static_cast<ssize_t>(size);
}

// The names of the class of the polymorphic object at `address` and of its bases, one a level;
// none if there is no such object, or if its class is not exported by a library.
inline std::vector<std::string> classes_at(uintptr_t address) {
    std::vector<std::string> names;
    if (address % alignof(void*) != 0 || !is_readable(address, sizeof(void*))) return names;
    // An object points to the third entry of its class's table; the second is the class's type.
    const auto* table = *reinterpret_cast<const std::type_info* const* const*>(address);
    Dl_info symbol{};
    if (dladdr(table, &symbol) == 0 || symbol.dli_sname == nullptr ||
        std::strncmp(symbol.dli_sname, "_ZTV", 4) != 0 || symbol.dli_saddr != table - 2) {
        return names;
    }
    for (const std::type_info* type = table[-1]; type != nullptr;) {
        const std::string name = type->name();  // of a class at top level: its length, its name
        names.push_back(name.substr(name.find_first_not_of("0123456789")));
        const auto* derived = dynamic_cast<const abi::__si_class_type_info*>(type);
        type = derived == nullptr ? nullptr : derived->__base_type;
    }
    return names;
}

}  // namespace tagi_ddp
