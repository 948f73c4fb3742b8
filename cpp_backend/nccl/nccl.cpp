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

Nccl::Nccl(const std::string& path) : library_(path) {
    int (*get_version)(int*) = nullptr;
    library_.get(get_version, "ncclGetVersion");
    library_.get(get_error_string_, "ncclGetErrorString");
    if (get_version(&version_) != success || version_ < oldest_version) {
        throw std::runtime_error(path + " is NCCL " + version_text(version_) +
                                 ", but 2.18 or newer is needed");
    }
    library_.get(get_unique_id_, "ncclGetUniqueId");
    library_.get(get_last_error_, "ncclGetLastError");
    library_.get(init_rank, "ncclCommInitRankConfig");
    library_.get(split, "ncclCommSplit");
    library_.get(abort, "ncclCommAbort");
    library_.get(get_async_error, "ncclCommGetAsyncError");
    library_.get(group_start, "ncclGroupStart");
    library_.get(group_end, "ncclGroupEnd");
    library_.get(all_reduce, "ncclAllReduce");
    library_.get(broadcast, "ncclBroadcast");
    library_.get(reduce, "ncclReduce");
    library_.get(reduce_scatter, "ncclReduceScatter");
    library_.get(all_gather, "ncclAllGather");
    library_.get(send, "ncclSend");
    library_.get(recv, "ncclRecv");
    library_.look_up(all_to_all, "ncclAlltoAll");
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

std::optional<int> Nccl::number_of(DType dtype) {
    switch (dtype) {
        case DType::i8:
            return 0;
        case DType::u8:
            return 1;
        case DType::i32:
            return 2;
        case DType::u32:
            return 3;
        case DType::i64:
            return 4;
        case DType::u64:
            return 5;
        case DType::f16:
            return 6;
        case DType::f32:
            return 7;
        case DType::f64:
            return 8;
        case DType::bf16:
            return 9;
        default:
            return std::nullopt;
    }
}

int Nccl::number_of(ReduceOp op) {
    switch (op) {
        case ReduceOp::max:
            return 2;
        case ReduceOp::min:
            return 3;
        case ReduceOp::mean:
            return 4;
        default:
            return 0;
    }
}

}  // namespace tagi_ddp
