// Sockets between each two ranks of a communicator, and what moves over them.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace stand_in {

class Socket {
 public:
    explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
    Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(descriptor_, other.descriptor_);
        return *this;
    }
    ~Socket() {
        if (descriptor_ >= 0) ::close(descriptor_);
    }

    static Socket make() { return Socket(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }
    int get() const { return descriptor_; }

 private:
    int descriptor_;
};

// What both ends must agree on. Without padding: it is compared by its bytes.
struct Header {
    uint64_t count = 0;
    int32_t kind = 0, dtype = 0, op = 0, root = 0;
};
static_assert(std::has_unique_object_representations_v<Header>);

// A header and then data, to a rank or from one.
struct Transfer {
    int peer;
    bool sends;
    Header header;
    std::byte* data;
    size_t bytes;
    size_t moved = 0;
    Header seen = {};  // what a receiver got
};

class Mesh {
 public:
    enum class Result { done, aborted, stuck, lost };

    // `aborted` ends all waits soon after it is set.
    Mesh(std::string name, int rank, int size, const std::atomic<bool>& aborted)
        : name_(std::move(name)), rank_(rank), aborted_(aborted), peers_(size_t(size)) {}

    // Returns when all ranks came. Throws std::system_error.
    Result connect() {
        const Socket listener = checked(Socket::make());
        const auto [address, length] = address_of(rank_);
        check(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length));
        check(listen(listener.get(), size()));
        for (int peer = 0; peer < rank_; ++peer) {
            if (!call(peer)) return Result::aborted;
        }
        for (int missing = size() - 1 - rank_; missing > 0; --missing) {
            if (!await(listener.get())) return Result::aborted;
            Socket connection =
                checked(Socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));
            if (!await(connection.get())) return Result::aborted;
            int32_t peer = 0;
            if (recv(connection.get(), &peer, sizeof peer, 0) != sizeof peer || peer <= rank_ ||
                peer >= size()) {
                throw std::system_error(EPROTO, std::generic_category());
            }
            keep(peer, std::move(connection));
        }
        return Result::done;
    }

    // Moves all of them, those of a peer and a direction in their order. `lost`: a peer is gone.
    // `stuck`: a peer's header differs.
    Result exchange(std::vector<Transfer>& transfers) {
        if (!move_own(transfers)) return Result::stuck;
        std::vector<Queues> queues(peers_.size());
        for (Transfer& transfer : transfers) {
            if (transfer.peer == rank_) continue;
            Queues& of_peer = queues[size_t(transfer.peer)];
            (transfer.sends ? of_peer.out : of_peer.in).push_back(&transfer);
        }
        while (true) {
            std::vector<pollfd> descriptors;
            std::vector<Queues*> waiting;
            for (size_t peer = 0; peer < queues.size(); ++peer) {
                const short events = short((queues[peer].out.empty() ? 0 : POLLOUT) |
                                           (queues[peer].in.empty() ? 0 : POLLIN));
                if (events == 0) continue;
                descriptors.push_back({peers_[peer].get(), events, 0});
                waiting.push_back(&queues[peer]);
            }
            if (waiting.empty()) return Result::done;
            poll(descriptors.data(), descriptors.size(), poll_ms);
            if (aborted_) return Result::aborted;
            for (size_t i = 0; i < waiting.size(); ++i) {
                if (descriptors[i].revents == 0) continue;
                for (auto* queue : {&waiting[i]->out, &waiting[i]->in}) {
                    const Result result = advance(descriptors[i].fd, *queue);
                    if (result != Result::done) return result;
                }
            }
        }
    }

    void close() { peers_.clear(); }

 private:
    static constexpr int poll_ms = 5;

    struct Queues {
        std::deque<Transfer*> out, in;
    };

    int size() const { return int(peers_.size()); }

    // In the abstract namespace: gone with its socket.
    std::pair<sockaddr_un, socklen_t> address_of(int rank) const {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        const std::string name = name_ + "." + std::to_string(rank);
        name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
        return {address, socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
    }

    static void check(int result) {
        if (result < 0) throw std::system_error(errno, std::generic_category());
    }

    static Socket checked(Socket socket) {
        check(socket.get());
        return socket;
    }

    // Until there is something to read or accept.
    bool await(int descriptor) const {
        while (!aborted_) {
            pollfd waited{descriptor, POLLIN, 0};
            if (poll(&waited, 1, poll_ms) > 0) return true;
        }
        return false;
    }

    // Until `peer` listens.
    bool call(int peer) {
        const auto [address, length] = address_of(peer);
        while (!aborted_) {
            Socket connection = checked(Socket::make());
            if (::connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) ==
                0) {
                const int32_t rank = rank_;
                check(int(::send(connection.get(), &rank, sizeof rank, MSG_NOSIGNAL)));
                keep(peer, std::move(connection));
                return true;
            }
            if (errno != ECONNREFUSED) check(-1);
            poll(nullptr, 0, poll_ms);
        }
        return false;
    }

    void keep(int peer, Socket connection) {
        // Doubled by the kernel: what is larger than 64 KB waits for its receiver.
        const int bytes = 32 * 1024;
        check(setsockopt(connection.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes));
        peers_[size_t(peer)] = std::move(connection);
    }

    // What a rank sends to itself.
    bool move_own(const std::vector<Transfer>& transfers) const {
        std::deque<const Transfer*> out, in;
        for (const Transfer& transfer : transfers) {
            if (transfer.peer == rank_) (transfer.sends ? out : in).push_back(&transfer);
        }
        for (; !out.empty() && !in.empty(); out.pop_front(), in.pop_front()) {
            if (!equal(out.front()->header, in.front()->header)) return false;
            if (in.front()->bytes > 0) {
                std::memmove(in.front()->data, out.front()->data, in.front()->bytes);
            }
        }
        return out.empty() && in.empty();
    }

    static bool equal(const Header& a, const Header& b) { return !std::memcmp(&a, &b, sizeof a); }

    // As far as the socket goes without waiting.
    Result advance(int descriptor, std::deque<Transfer*>& queue) const {
        while (!queue.empty()) {
            Transfer& transfer = *queue.front();
            while (transfer.moved < sizeof(Header) + transfer.bytes) {
                if (aborted_) return Result::aborted;
                const ssize_t moved = move_some(descriptor, transfer);
                if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return Result::done;
                if (moved <= 0) return Result::lost;
                transfer.moved += size_t(moved);
                if (!transfer.sends && transfer.moved == sizeof(Header) &&
                    !equal(transfer.seen, transfer.header)) {
                    return Result::stuck;
                }
            }
            queue.pop_front();
        }
        return Result::done;
    }

    static ssize_t move_some(int descriptor, Transfer& transfer) {
        const bool in_header = transfer.moved < sizeof(Header);
        std::byte* const begin =
            !in_header
                ? transfer.data + (transfer.moved - sizeof(Header))
                : reinterpret_cast<std::byte*>(transfer.sends ? &transfer.header : &transfer.seen) +
                      transfer.moved;
        const size_t end = in_header ? sizeof(Header) : sizeof(Header) + transfer.bytes;
        // A part at a time, so that an abort is seen soon.
        const size_t bytes = std::min(end - transfer.moved, size_t{1} << 18);
        return transfer.sends ? ::send(descriptor, begin, bytes, MSG_DONTWAIT | MSG_NOSIGNAL)
                              : ::recv(descriptor, begin, bytes, MSG_DONTWAIT);
    }

    const std::string name_;
    const int rank_;
    const std::atomic<bool>& aborted_;
    std::vector<Socket> peers_;
};

}  // namespace stand_in
