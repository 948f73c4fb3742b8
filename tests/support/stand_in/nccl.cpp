// A stand-in for libnccl: non-blocking communicators between processes of one host, by sockets.
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <set>

#include "communicator.h"

extern "C" int standInEnqueue(void* stream, void (*run)(void*), void* argument);
extern "C" int standInDevice(void* stream);

// The public interface's types.
struct ncclUniqueId {
    char internal[128];
};

struct ncclConfig {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cga_cluster_size;
    int min_ctas;
    int max_ctas;
    const char* net_name;
    int split_share;
};

namespace stand_in {
namespace {

using Shared = std::shared_ptr<Communicator>;
using Batch = Communicator::Batch;

struct LastError {
    std::mutex mutex;
    std::set<std::string> texts;  // never forgotten: callers keep pointers to them
    const char* last = "";
};

int fail(int code, const std::string& text) {
    LastError& error = immortal<LastError>();
    const std::lock_guard lock(error.mutex);
    error.last = error.texts.insert("stand-in: " + text).first->c_str();
    return code;
}

int injected(const Fault& fault, const std::string& function) {
    if (fault.kind == Fault::Kind::none) return success;
    fail(success, "injected in " + function);
    return fault.kind == Fault::Kind::code ? fault.number : success;
}

int injected(const char* function, int rank = rank_of_process()) {
    return injected(find_fault(function, {}, rank), function);
}

Shared find(void* handle) { return immortal<Registry<Communicator>>().find(handle); }

struct Call {
    Shared communicator;
    Operation operation;
    Fault fault;
};

// The calls between ncclGroupStart and ncclGroupEnd of this thread.
struct Group {
    int depth = 0;
    int error = success;
    std::vector<Call> calls;
};
thread_local Group group;

// What a batch still is to each of its streams.
struct Part {
    std::shared_ptr<Batch> batch;
    size_t stream;
};

void run_part(void* argument) {
    const std::unique_ptr<Part> part(static_cast<Part*>(argument));
    part->batch->communicator->run(*part->batch, part->stream);
}

// Puts a batch into its streams.
int enqueue(const std::shared_ptr<Batch>& batch) {
    for (size_t stream = 0; stream < batch->streams.size(); ++stream) {
        auto part = std::make_unique<Part>(Part{batch, stream});
        if (standInEnqueue(batch->streams[stream], run_part, part.get()) != 0) {
            return fail(unhandled_cuda, "no such stream");
        }
        part.release();
    }
    return success;
}

// One batch for each communicator, in the order of the calls.
std::vector<std::shared_ptr<Batch>> batches_of(const std::vector<Call>& calls) {
    std::vector<std::shared_ptr<Batch>> batches;
    for (const auto& [communicator, operation, fault] : calls) {
        auto found = std::find_if(batches.begin(), batches.end(), [&](const auto& batch) {
            return batch->communicator == communicator;
        });
        if (found == batches.end()) {
            const bool reports_loss =
                find_fault("remote", {Fault::Kind::flag}, communicator->rank).kind ==
                Fault::Kind::flag;
            batches.push_back(std::make_shared<Batch>(
                Batch{communicator, {}, {}, communicator->draw_ticket(), reports_loss}));
            found = batches.end() - 1;
        }
        Batch& batch = **found;
        batch.operations.push_back(operation);
        if (fault.kind != Fault::Kind::none) batch.fault = fault;
        if (std::find(batch.streams.begin(), batch.streams.end(), operation.stream) ==
            batch.streams.end()) {
            batch.streams.push_back(operation.stream);
        }
    }
    return batches;
}

// Every second time, the streams get their work in the background, unless the call is blocking.
int launch(const std::vector<Call>& calls) {
    const auto batches = batches_of(calls);
    for (const auto& batch : batches) {
        if (batch->communicator->blocking && batch->fault.kind == Fault::Kind::progress) {
            batch->communicator->wait_for_abort();
            return fail(system_failure, "aborted while waiting");
        }
    }
    const auto later = [](const auto& batch) {
        return !batch->communicator->blocking &&
               (batch->ticket % 2 == 1 || batch->fault.kind == Fault::Kind::progress);
    };
    if (std::none_of(batches.begin(), batches.end(), later)) {
        for (const auto& batch : batches) {
            if (const int code = enqueue(batch)) return code;
        }
        return success;
    }
    for (const auto& batch : batches) batch->communicator->enter();
    // One thread for all: in the streams, too, the order is that of the calls.
    std::thread([batches] {
        dawdle();
        std::vector<int> results;
        for (const auto& batch : batches) {
            const bool stays = batch->fault.kind == Fault::Kind::progress;
            results.push_back(stays ? in_progress : enqueue(batch));
        }
        for (size_t i = 0; i < batches.size(); ++i) batches[i]->communicator->leave(results[i]);
    }).detach();
    return in_progress;
}

// Why the communicator cannot take the operation; success if it can.
int check(const char* function, Communicator& communicator, const Operation& o) {
    const auto refuse = [&](int code, const std::string& why) {
        return fail(code, std::string(function) + ": " + why);
    };
    const int state = communicator.state();
    if (state == in_progress) {
        return refuse(invalid_usage, "called while the call before it is in progress");
    }
    if (state != success) return refuse(state, "called after an error");
    if (communicator.finalized()) return refuse(invalid_usage, "called after ncclCommFinalize");
    if (size_of(o.dtype) == 0) return refuse(invalid_argument, "no such type");
    if (o.op < sum || o.op > avg) return refuse(invalid_argument, "no such reduction");
    if (o.op == avg && !is_float(o.dtype)) {
        return refuse(invalid_argument, "no average of integers");
    }
    if (o.root < 0 || o.root >= communicator.size) return refuse(invalid_argument, "no such rank");
    const bool is_root = communicator.rank == o.root;
    const bool reads = o.kind != Kind::recv && (o.kind != Kind::broadcast || is_root);
    const bool writes = o.kind != Kind::send && (o.kind != Kind::reduce || is_root);
    if (o.count > 0 && ((reads && o.in == nullptr) || (writes && o.out == nullptr))) {
        return refuse(invalid_argument, "no memory given");
    }
    if (o.kind == Kind::all_to_all && o.count > 0 && o.in == o.out) {
        return refuse(invalid_argument, "cannot run in place");
    }
    if (o.stream != nullptr && standInDevice(o.stream) != communicator.device) {
        return refuse(unhandled_cuda, "no stream of the communicator's device");
    }
    return success;
}

int submit(const char* function, void* handle, const Operation& operation) {
    const Shared communicator = find(handle);
    if (communicator == nullptr) return fail(invalid_argument, "no such communicator");
    const Fault fault =
        find_fault(function, {Fault::Kind::hang, Fault::Kind::progress, Fault::Kind::async},
                   communicator->rank);
    int code = injected(fault, function);
    if (code == success) code = check(function, *communicator, operation);
    if (group.depth == 0)
        return code == success ? launch({{communicator, operation, fault}}) : code;
    if (code == success) {
        group.calls.push_back({communicator, operation, fault});
    } else if (group.error == success) {
        group.error = code;
    }
    return code;
}

std::string name_of(const ncclUniqueId& id) {
    return {id.internal, strnlen(id.internal, sizeof id.internal)};
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

STAND_IN_API int ncclGetVersion(int* version) {
    const Fault fault = find_fault(__func__, {Fault::Kind::value});
    if (const int code = injected(fault, __func__)) return code;
    *version = fault.kind == Fault::Kind::value ? fault.number : 22807;
    return success;
}

STAND_IN_API int ncclGetUniqueId(ncclUniqueId* id) {
    if (const int code = injected(__func__)) return code;
    std::array<unsigned char, 16> random;
    if (getrandom(random.data(), random.size(), 0) != ssize_t(random.size())) {
        return fail(system_failure, "no random bytes");
    }
    *id = {};
    char* to = id->internal;
    to += std::sprintf(to, "nccl-stand-in-");
    for (const unsigned char byte : random) to += std::sprintf(to, "%02x", byte);
    return success;
}

STAND_IN_API int ncclCommInitRankConfig(void** handle, int size, ncclUniqueId id, int rank,
                                        const ncclConfig* config) {
    const Fault fault = find_fault(__func__, {Fault::Kind::hang, Fault::Kind::async}, rank);
    if (const int code = injected(fault, __func__)) return code;
    if (size < 1 || rank < 0 || rank >= size) return fail(invalid_argument, "no such rank");
    if (config == nullptr || config->magic != 0xcafebeef) {
        return fail(invalid_argument, "no configuration");
    }
    if (config->size < offsetof(ncclConfig, cga_cluster_size) || config->blocking != 0) {
        return fail(invalid_argument, "only non-blocking communicators are known");
    }
    if (name_of(id).empty()) return fail(invalid_argument, "the id is empty");
    const int device = standInDevice(nullptr);
    if (device < 0) return fail(unhandled_cuda, "no context is current");
    const auto communicator =
        std::make_shared<Communicator>(name_of(id), rank, size, device, false);
    *handle = immortal<Registry<Communicator>>().add(communicator);
    communicator->in_background([communicator = communicator.get(), fault] {
        dawdle();
        if (fault.kind == Fault::Kind::async) return fault.number;
        return fault.kind == Fault::Kind::none ? communicator->connect() : in_progress;
    });
    return in_progress;
}

STAND_IN_API int ncclCommSplit(void* handle, int color, int, void** part,
                               const ncclConfig* config) {
    const Shared communicator = find(handle);
    if (communicator == nullptr) return fail(invalid_argument, "no such communicator");
    const Fault fault =
        find_fault(__func__, {Fault::Kind::hang, Fault::Kind::async}, communicator->rank);
    if (const int code = injected(fault, __func__)) return code;
    if (communicator->state() != success) return fail(invalid_usage, "split while in progress");
    if (color != 0) return fail(invalid_argument, "only all ranks together are known");
    if (config == nullptr || config->magic != 0xcafebeef) {
        return fail(invalid_argument, "no configuration");
    }
    const Shared made = communicator->split(config->blocking != 0);
    *part = immortal<Registry<Communicator>>().add(made);
    communicator->in_background([made, fault] {
        dawdle();
        if (fault.kind == Fault::Kind::async) return fault.number;
        return fault.kind == Fault::Kind::none ? made->connect() : in_progress;
    });
    return in_progress;
}

STAND_IN_API int ncclCommFinalize(void* handle) {
    const Shared communicator = find(handle);
    if (communicator == nullptr) return fail(invalid_argument, "no such communicator");
    const Fault fault =
        find_fault(__func__, {Fault::Kind::hang, Fault::Kind::async}, communicator->rank);
    if (const int code = injected(fault, __func__)) return code;
    return communicator->finalize(fault);
}

// Like NCCL, waits for what is still to be done, forever if that hangs.
STAND_IN_API int ncclCommDestroy(void* handle) {
    const Shared communicator = find(handle);
    if (communicator == nullptr) return fail(invalid_argument, "no such communicator");
    if (const int code = injected(__func__, communicator->rank)) return code;
    communicator->drain();
    communicator->abort();
    immortal<Registry<Communicator>>().remove(handle);
    return success;
}

STAND_IN_API int ncclCommAbort(void* handle) {
    const Shared communicator = find(handle);
    if (communicator == nullptr) return fail(invalid_argument, "no such communicator");
    if (const int code = injected(__func__, communicator->rank)) return code;
    communicator->abort();
    immortal<Registry<Communicator>>().remove(handle);
    return success;
}

STAND_IN_API int ncclCommGetAsyncError(void* handle, int* code) {
    const Shared communicator = find(handle);
    if (communicator == nullptr) return fail(invalid_argument, "no such communicator");
    if (const int refused = injected(__func__, communicator->rank)) return refused;
    *code = communicator->state();
    return success;
}

STAND_IN_API const char* ncclGetErrorString(int code) {
    static constexpr std::array texts{"no error",       "unhandled cuda error", "system error",
                                      "internal error", "invalid argument",     "invalid usage",
                                      "remote error",   "in progress"};
    return code >= 0 && code < int(texts.size()) ? texts[size_t(code)] : "unknown result code";
}

STAND_IN_API const char* ncclGetLastError(void*) {
    LastError& error = immortal<LastError>();
    const std::lock_guard lock(error.mutex);
    return error.last;
}

STAND_IN_API int ncclGroupStart() {
    if (const int code = injected(__func__)) return code;
    ++group.depth;
    return success;
}

STAND_IN_API int ncclGroupEnd() {
    if (group.depth == 0) return fail(invalid_usage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0) return success;
    const Group ended = std::exchange(group, {});
    const int rank = ended.calls.empty() ? rank_of_process() : ended.calls[0].communicator->rank;
    if (const int code = injected(__func__, rank)) return code;
    return ended.error != success || ended.calls.empty() ? ended.error : launch(ended.calls);
}

STAND_IN_API int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op,
                               void* handle, void* stream) {
    return submit(__func__, handle, {Kind::all_reduce, in, out, count, dtype, op, 0, stream});
}

STAND_IN_API int ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root,
                               void* handle, void* stream) {
    return submit(__func__, handle, {Kind::broadcast, in, out, count, dtype, sum, root, stream});
}

STAND_IN_API int ncclReduce(const void* in, void* out, size_t count, int dtype, int op, int root,
                            void* handle, void* stream) {
    return submit(__func__, handle, {Kind::reduce, in, out, count, dtype, op, root, stream});
}

STAND_IN_API int ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int op,
                                   void* handle, void* stream) {
    return submit(__func__, handle, {Kind::reduce_scatter, in, out, count, dtype, op, 0, stream});
}

STAND_IN_API int ncclAllGather(const void* in, void* out, size_t count, int dtype, void* handle,
                               void* stream) {
    return submit(__func__, handle, {Kind::all_gather, in, out, count, dtype, sum, 0, stream});
}

STAND_IN_API int ncclAlltoAll(const void* in, void* out, size_t count, int dtype, void* handle,
                              void* stream) {
    return submit(__func__, handle, {Kind::all_to_all, in, out, count, dtype, sum, 0, stream});
}

STAND_IN_API int ncclSend(const void* in, size_t count, int dtype, int peer, void* handle,
                          void* stream) {
    return submit(__func__, handle, {Kind::send, in, nullptr, count, dtype, sum, peer, stream});
}

STAND_IN_API int ncclRecv(void* out, size_t count, int dtype, int peer, void* handle,
                          void* stream) {
    return submit(__func__, handle, {Kind::recv, nullptr, out, count, dtype, sum, peer, stream});
}

// The engine's wheel is linked to it; nobody calls it here.
STAND_IN_API int ncclCommInitRank(void**, int, ncclUniqueId, int) { return invalid_usage; }
