// A stand-in for NCCL's libnccl.so.2 on hosts without NCCL: the symbols that the engine is linked
// to. Every call fails, and ncclGetErrorString returns the reason.

extern "C" {

__attribute__((visibility("hidden"))) int not_available() noexcept {
    return 2;  // ncclSystemError
}

#define STAND_IN(name) int name() noexcept __attribute__((alias("not_available")))

STAND_IN(ncclAllReduce);
STAND_IN(ncclBroadcast);
STAND_IN(ncclCommDestroy);
STAND_IN(ncclCommGetAsyncError);
STAND_IN(ncclCommInitRank);
STAND_IN(ncclGetUniqueId);
STAND_IN(ncclGetVersion);

const char* ncclGetErrorString(int) {
    return "NCCL was not found and tagi_ddp's stand-in took its place: pip install "
           "nvidia-nccl-cu12 (or -cu13), or set TAGI_DDP_LIBNCCL to the path of libnccl.so.2, "
           "and start again";
}

}  // extern "C"
