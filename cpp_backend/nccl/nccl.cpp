#include "nccl/nccl.h"

#include <stdexcept>

namespace tagi_ddp {
namespace {

constexpr int oldest_version = 21800;

std::string version_text(int version) {
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
}

}  // namespace

Nccl::Nccl(const std::string& path) : library_(path) {}

int Nccl::checked_version() const {
    int (*get_version)(int*) = library_.require("ncclGetVersion");
    int version = 0;
    if (get_version(&version) != success || version < oldest_version) {
        throw std::runtime_error(path() + " is NCCL " + version_text(version) +
                                 ", but 2.18 or newer is needed");
    }
    return version;
}

NcclId Nccl::unique_id() const {
    NcclId id{};
    check(get_unique_id_(&id), "ncclGetUniqueId", nullptr);
    return id;
}

void Nccl::check(int code, const char* function, void* communicator) const {
    if (code == success || code == in_progress) return;
    const char* text = get_error_string_(code);
    const char* last = get_last_error_(communicator);
    std::string message = std::string(function) + ": " + (text == nullptr ? "" : text);
    if (last != nullptr && *last != '\0') message += std::string(" (") + last + ")";
    throw std::runtime_error(message);
}

int Nccl::number_of(DType dtype) {
    // By DType: f16, bf16, f32, f64, then signed and unsigned integers of 8, 16, 32 and 64 bits.
    constexpr int numbers[] = {6, 9, 7, 8, 0, -1, 2, 4, 1, -1, 3, 5};
    const int number = numbers[static_cast<uint32_t>(dtype)];
    if (number < 0) throw std::runtime_error(std::string("NCCL does not reduce ") + name_of(dtype));
    return number;
}

int Nccl::number_of(ReduceOp op) {
    constexpr int numbers[] = {0, 4, 3, 2};  // sum, mean, min, max
    return numbers[static_cast<uint32_t>(op)];
}

}  // namespace tagi_ddp
