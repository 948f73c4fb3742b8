// The functions of NCCL 2.18 or newer, opened at run time, so its headers are not needed.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "common/dtype.h"
#include "nccl/library.h"

namespace tagi_ddp {

struct NcclId {
    std::array<char, 128> bytes;
};

// The configuration of a communicator of NCCL 2.18. Newer versions read only `size` bytes of it.
struct NcclConfig {
    size_t size = sizeof(NcclConfig);
    unsigned magic = 0xcafebeef;
    unsigned version = 21800;
    int blocking = 0;
    int cga_cluster_size = undefined;
    int min_ctas = undefined;
    int max_ctas = undefined;
    const char* net_name = nullptr;
    int split_share = undefined;

    static constexpr int undefined = -2147483647 - 1;
};

class Nccl {
    int checked_version() const;

    // The functions below are found in it, so it comes first.
    Library library_;
    int version_ = checked_version();
    int (*get_unique_id_)(NcclId* id) = library_.require("ncclGetUniqueId");
    const char* (*get_error_string_)(int code) = library_.require("ncclGetErrorString");
    const char* (*get_last_error_)(void* communicator) = library_.require("ncclGetLastError");

 public:
    static constexpr int success = 0, in_progress = 7;

    // Throws std::runtime_error if the library cannot be opened, is too old, or lacks a function.
    explicit Nccl(const std::string& path);

    int version() const { return version_; }  // 22807 is 2.28.7
    const std::string& path() const { return library_.path(); }
    NcclId unique_id() const;
    // Throws std::runtime_error with NCCL's texts unless `code` is success or in_progress.
    void check(int code, const char* function, void* communicator) const;

    int (*init_rank)(void** communicator, int size, NcclId id, int rank,
                     NcclConfig* config) = library_.require("ncclCommInitRankConfig");
    // Sets `*part` once nothing is in progress on `communicator`.
    int (*split)(void* communicator, int color, int key, void** part,
                 NcclConfig* config) = library_.require("ncclCommSplit");
    int (*abort)(void* communicator) = library_.require("ncclCommAbort");
    int (*get_async_error)(void* communicator,
                           int* code) = library_.require("ncclCommGetAsyncError");
    int (*group_start)() = library_.require("ncclGroupStart");
    int (*group_end)() = library_.require("ncclGroupEnd");
    int (*all_reduce)(const void* in, void* out, size_t count, int dtype, int op, void* comm,
                      void* stream) = library_.require("ncclAllReduce");
    int (*broadcast)(const void* in, void* out, size_t count, int dtype, int root, void* comm,
                     void* stream) = library_.require("ncclBroadcast");
    int (*reduce)(const void* in, void* out, size_t count, int dtype, int op, int root, void* comm,
                  void* stream) = library_.require("ncclReduce");
    int (*reduce_scatter)(const void* in, void* out, size_t count, int dtype, int op, void* comm,
                          void* stream) = library_.require("ncclReduceScatter");
    int (*all_gather)(const void* in, void* out, size_t count, int dtype, void* comm,
                      void* stream) = library_.require("ncclAllGather");
    int (*send)(const void* in, size_t count, int dtype, int peer, void* comm,
                void* stream) = library_.require("ncclSend");
    int (*recv)(void* out, size_t count, int dtype, int peer, void* comm,
                void* stream) = library_.require("ncclRecv");
    // Null before NCCL 2.28.
    int (*all_to_all)(const void* in, void* out, size_t count, int dtype, void* comm,
                      void* stream) = library_.find("ncclAlltoAll");

    // NCCL's number of an element type. Throws std::runtime_error if it does not reduce that type.
    static int number_of(DType dtype);
    static int number_of(ReduceOp op);
};

}  // namespace tagi_ddp
