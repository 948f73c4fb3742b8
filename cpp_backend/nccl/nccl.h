// NCCL's functions, opened at run time; 2.18 or newer, without its headers.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>

#include "common/dtype.h"
#include "nccl/library.h"

namespace tagi_ddp {

struct NcclId {
    std::array<char, 128> bytes;
};

// NCCL 2.18's configuration of a communicator; newer ones read no further than `size`.
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
 public:
    static constexpr int success = 0, in_progress = 7;

    // Throws std::runtime_error if the library cannot be opened, is too old, or lacks a function.
    explicit Nccl(const std::string& path);

    int version() const { return version_; }  // 22807 is 2.28.7
    const std::string& path() const { return library_.path(); }
    NcclId unique_id() const;
    // Throws std::runtime_error with NCCL's own texts unless `code` is success or in progress.
    void check(int code, const char* function, void* communicator) const;

    int (*init_rank)(void** communicator, int size, NcclId id, int rank, NcclConfig* config);
    // `*part` is there once nothing is in progress on `communicator`.
    int (*split)(void* communicator, int color, int key, void** part, NcclConfig* config);
    int (*abort)(void* communicator);
    int (*get_async_error)(void* communicator, int* code);
    int (*group_start)();
    int (*group_end)();
    int (*all_reduce)(const void* in, void* out, size_t count, int dtype, int op, void* comm,
                      void* stream);
    int (*broadcast)(const void* in, void* out, size_t count, int dtype, int root, void* comm,
                     void* stream);
    int (*reduce)(const void* in, void* out, size_t count, int dtype, int op, int root, void* comm,
                  void* stream);
    int (*reduce_scatter)(const void* in, void* out, size_t count, int dtype, int op, void* comm,
                          void* stream);
    int (*all_gather)(const void* in, void* out, size_t count, int dtype, void* comm, void* stream);
    int (*send)(const void* in, size_t count, int dtype, int peer, void* comm, void* stream);
    int (*recv)(void* out, size_t count, int dtype, int peer, void* comm, void* stream);
    // Null before NCCL 2.28.
    int (*all_to_all)(const void* in, void* out, size_t count, int dtype, void* comm, void* stream);

    // NCCL's number of an element type; none for those that it does not reduce.
    static std::optional<int> number_of(DType dtype);
    static int number_of(ReduceOp op);

 private:
    Library library_;
    int version_ = 0;
    int (*get_unique_id_)(NcclId* id);
    const char* (*get_error_string_)(int code);
    const char* (*get_last_error_)(void* communicator);
};

}  // namespace tagi_ddp
