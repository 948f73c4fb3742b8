#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

namespace tagi_ddp {
namespace {

constexpr size_t page = 4096;

constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// The offsets of the parts. The failure is at 0.
struct Layout {
    explicit Layout(int size) {
        const size_t n = static_cast<size_t>(size);
        ranks = round_up(sizeof(Failure), page);
        channels = round_up(ranks + n * sizeof(RankState), page);
        slots = round_up(channels + n * n * sizeof(Channel), page);
        packets = slots + n * num_slots * slot_bytes;
        heap = packets + n * n * num_packets * packet_bytes;
    }
    size_t ranks, channels, slots, packets, heap;
};

// The size of the host's memory. It only takes address space.
size_t heap_bytes() { return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page; }

// The lock on a rank's byte.
struct flock lock_of(int rank) {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

// Takes this rank's lock, which shows that its process exists.
void claim(const Rendezvous& rendezvous, int file) {
    struct flock lock = lock_of(rendezvous.rank);
    if (fcntl(file, F_SETLK, &lock) != 0) {
        fail(rendezvous, ErrorKind::unavailable,
             std::string("cannot lock: ") + std::strerror(errno));
    }
}

}  // namespace

Segment::Segment(const Rendezvous& rendezvous)
    : rank_(rendezvous.rank),
      size_(rendezvous.size),
      bytes_(Layout(rendezvous.size).heap + heap_bytes()),
      file_(share_memory(rendezvous, bytes_, [&](int file) { claim(rendezvous, file); })),
      heap_next_(Layout(rendezvous.size).heap) {
    void* address =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
    if (address == MAP_FAILED) {
        fail(rendezvous, ErrorKind::unavailable,
             "cannot map " + std::to_string(bytes_ >> 20) +
                 " MiB of address space: " + std::strerror(errno) + ". Raise `ulimit -v`.");
    }
    base_ = static_cast<std::byte*>(address);
    // A new file is zero, which is the initial state of every structure in it.
}

Segment::~Segment() { munmap(base_, bytes_); }

RankState& Segment::rank(int r) const {
    return reinterpret_cast<RankState*>(base_ + Layout(size_).ranks)[r];
}

Failure& Segment::failure() const { return *reinterpret_cast<Failure*>(base_); }

std::byte* Segment::slot(int r, uint32_t round) const {
    const size_t index = static_cast<size_t>(r) * num_slots + round % num_slots;
    return base_ + Layout(size_).slots + index * slot_bytes;
}

Channel& Segment::channel(int src, int dst) const {
    return reinterpret_cast<Channel*>(base_ + Layout(size_).channels)[src * size_ + dst];
}

std::byte* Segment::packet(int src, int dst, uint32_t number) const {
    const size_t pair =
        static_cast<size_t>(src) * static_cast<size_t>(size_) + static_cast<size_t>(dst);
    const size_t index = pair * num_packets + number % num_packets;
    return base_ + Layout(size_).packets + index * packet_bytes;
}

bool Segment::alive(int r) const {
    if (rank(r).closed.load(std::memory_order_acquire)) return true;
    struct flock lock = lock_of(r);
    if (fcntl(file_.get(), F_GETLK, &lock) != 0) return true;
    return lock.l_type != F_UNLCK;
}

std::byte* Segment::allocate(size_t bytes) {
    const size_t stride = round_up(bytes == 0 ? 1 : bytes, page);
    const size_t n = static_cast<size_t>(size_);
    if (stride > (bytes_ - heap_next_) / n) throw std::bad_alloc();
    const size_t own = heap_next_ + static_cast<size_t>(rank_) * stride;
    // Reserve the pages now: otherwise a full host would end the process by a signal later.
    if (posix_fallocate(file_.get(), static_cast<off_t>(own), static_cast<off_t>(stride)) != 0) {
        throw std::bad_alloc();
    }
    allocations_.push_back({heap_next_, stride});
    heap_next_ += n * stride;
    return base_ + own;
}

std::optional<Segment::Location> Segment::find(const std::byte* data, size_t bytes) const {
    if (data < base_ || data >= base_ + heap_next_) return std::nullopt;
    for (const Allocation& allocation : allocations_) {
        const std::byte* begin =
            base_ + allocation.begin + static_cast<size_t>(rank_) * allocation.stride;
        if (data >= begin && data + bytes <= begin + allocation.stride) {
            return Location{allocation.begin + static_cast<uint64_t>(data - begin),
                            static_cast<std::ptrdiff_t>(allocation.stride)};
        }
    }
    return std::nullopt;
}

}  // namespace tagi_ddp
