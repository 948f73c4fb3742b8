#include "shm/rendezvous.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "common/errors.h"

namespace tagi_ddp {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds poll_interval{50};
constexpr size_t text_bytes = 480;

struct Hello {
    uint32_t rank;
    uint32_t size;
};

struct Reply {
    uint32_t kind;  // ErrorKind + 1, 0 when all is well and the descriptor comes along
    int32_t culprit;
    char text[text_bytes];
};

std::string where(const Meeting& m) {
    return "init on rank " + std::to_string(m.rank) + " of " + std::to_string(m.size) + " (shm): ";
}

[[noreturn]] void system_error(const Meeting& m, const char* call) {
    throw CommunicatorError(ErrorKind::unavailable,
                            where(m) + call + " failed: " + std::strerror(errno) +
                                ". Choose another backend, or mend what the system refuses.");
}

// 64-bit FNV-1a: any job name fits the 107 bytes of a socket's name.
uint64_t hash(const std::string& text) {
    uint64_t value = 1469598103934665603ull;
    for (unsigned char c : text) value = (value ^ c) * 1099511628211ull;
    return value;
}

std::pair<sockaddr_un, socklen_t> address_of(const std::string& job) {
    const std::string name =
        "tagi_ddp/" + std::to_string(geteuid()) + "/" + std::to_string(hash(job));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);  // a leading 0: abstract
    return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

FileDescriptor make_socket(const Meeting& m) {
    FileDescriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) system_error(m, "socket");
    return fd;
}

// Waits for `events`; false when the deadline has passed.
bool wait_for(const Meeting& m, int fd, short events) {
    while (true) {
        if (m.on_wait) m.on_wait();
        const auto left = m.deadline - steady_clock::now();
        if (left <= steady_clock::duration::zero()) return false;
        pollfd entry{fd, events, 0};
        const auto step = std::min(std::chrono::duration_cast<milliseconds>(left), poll_interval);
        if (poll(&entry, 1, static_cast<int>(step.count()) + 1) > 0) return true;
    }
}

bool same_user(int fd) {
    ucred credentials{};
    socklen_t length = sizeof credentials;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
           credentials.uid == geteuid();
}

void answer(int fd, const Reply& reply, int memory) {
    iovec part{const_cast<Reply*>(&reply), sizeof reply};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (memory >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(header), &memory, sizeof memory);
    }
    // A rank that has gone meanwhile is noticed by the first operation.
    (void)sendmsg(fd, &message, MSG_NOSIGNAL);
}

Reply refusal(const CommunicatorError& error) {
    Reply reply{};
    reply.kind = static_cast<uint32_t>(error.kind()) + 1;
    reply.culprit = error.ranks().empty() ? -1 : error.ranks().front();
    std::strncpy(reply.text, error.what(), text_bytes - 1);
    return reply;
}

FileDescriptor make_memory(const Meeting& m, size_t bytes) {
    FileDescriptor memory(memfd_create("tagi_ddp", MFD_CLOEXEC));
    if (!memory) system_error(m, "memfd_create");
    if (fchmod(memory.get(), S_IRUSR | S_IWUSR) != 0) system_error(m, "fchmod");
    if (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) system_error(m, "ftruncate");
    return memory;
}

// Binds the job's name, waiting while an earlier group of the same name still holds it.
FileDescriptor listen_at(const Meeting& m) {
    FileDescriptor listener = make_socket(m);
    const auto [address, length] = address_of(m.job);
    while (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
        if (errno != EADDRINUSE) system_error(m, "bind");
        if (m.on_wait) m.on_wait();
        if (steady_clock::now() >= m.deadline) {
            throw CommunicatorError(ErrorKind::mismatch,
                                    where(m) + "another rank 0 of job '" + m.job +
                                        "' is there already. Give every rank its own number, and "
                                        "every job of this user its own TAGI_DDP_JOB.",
                                    {0});
        }
        std::this_thread::sleep_for(milliseconds(5));
    }
    if (listen(listener.get(), std::max(m.size, 16)) != 0) system_error(m, "listen");
    return listener;
}

void check(const Meeting& m, const Hello& hello, const std::vector<FileDescriptor>& peers) {
    const int rank = static_cast<int>(hello.rank);
    if (hello.size != static_cast<uint32_t>(m.size)) {
        throw CommunicatorError(ErrorKind::mismatch,
                                where(m) + "rank " + std::to_string(rank) + " says world size " +
                                    std::to_string(hello.size) + ", rank 0 says " +
                                    std::to_string(m.size) + ". Give all ranks the same.",
                                {rank});
    }
    if (rank < 1 || rank >= m.size || peers[static_cast<size_t>(rank)]) {
        throw CommunicatorError(ErrorKind::mismatch,
                                where(m) + "rank " + std::to_string(rank) +
                                    " came twice. Give every rank its own number, and every job of "
                                    "this user its own TAGI_DDP_JOB.",
                                {rank});
    }
}

void accept_all(const Meeting& m, int listener, std::vector<FileDescriptor>& peers) {
    for (int missing = m.size - 1; missing > 0;) {
        if (!wait_for(m, listener, POLLIN)) {
            std::vector<int> absent;
            std::string names;
            for (int r = 1; r < m.size; ++r) {
                if (peers[static_cast<size_t>(r)]) continue;
                absent.push_back(r);
                names += (names.empty() ? "" : ", ") + std::to_string(r);
            }
            throw CommunicatorError(ErrorKind::timeout,
                                    where(m) + "did not come in time: rank " + names +
                                        ". Look at its output; raise timeout= if it is only slow.",
                                    absent);
        }
        FileDescriptor peer(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        Hello hello{};
        // Connecting and saying hello are one step for a rank; who does not is none of ours.
        if (!peer || !same_user(peer.get())) continue;
        if (!wait_for(m, peer.get(), POLLIN)) continue;
        if (recv(peer.get(), &hello, sizeof hello, 0) != sizeof hello) continue;
        try {
            check(m, hello, peers);
        } catch (const CommunicatorError& error) {
            answer(peer.get(), refusal(error), -1);
            throw;
        }
        peers[hello.rank] = std::move(peer);
        --missing;
    }
}

FileDescriptor host(const Meeting& m, size_t bytes) {
    FileDescriptor listener = listen_at(m);
    FileDescriptor memory = make_memory(m, bytes);
    std::vector<FileDescriptor> peers(static_cast<size_t>(m.size));
    try {
        accept_all(m, listener.get(), peers);
    } catch (const CommunicatorError& error) {
        for (const auto& peer : peers) {
            if (peer) answer(peer.get(), refusal(error), -1);
        }
        throw;
    }
    for (int r = 1; r < m.size; ++r)
        answer(peers[static_cast<size_t>(r)].get(), Reply{}, memory.get());
    return memory;
}

// Connects to rank 0 and says hello; the socket is closed again if rank 0 is not there.
FileDescriptor try_connect(const Meeting& m) {
    FileDescriptor fd = make_socket(m);
    const auto [address, length] = address_of(m.job);
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
        if (errno != ECONNREFUSED && errno != ENOENT && errno != EAGAIN) system_error(m, "connect");
        return FileDescriptor();
    }
    if (!same_user(fd.get())) return FileDescriptor();
    const Hello hello{static_cast<uint32_t>(m.rank), static_cast<uint32_t>(m.size)};
    if (send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return FileDescriptor();
    return fd;
}

FileDescriptor receive_memory(const Meeting& m, int fd) {
    Reply reply{};
    iovec part{&reply, sizeof reply};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(fd, &message, MSG_CMSG_CLOEXEC) != sizeof reply) {
        throw CommunicatorError(ErrorKind::peer_lost,
                                where(m) + "rank 0 went away. Look at that rank's output.", {0});
    }
    if (reply.kind != 0) {
        reply.text[text_bytes - 1] = '\0';
        throw CommunicatorError(
            static_cast<ErrorKind>(reply.kind - 1), where(m) + "refused by rank 0: " + reply.text,
            reply.culprit < 0 ? std::vector<int>{} : std::vector<int>{reply.culprit});
    }
    int memory = -1;
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
        std::memcpy(&memory, CMSG_DATA(header), sizeof memory);
    }
    if (memory < 0) system_error(m, "receiving the memory file");
    return FileDescriptor(memory);
}

FileDescriptor join(const Meeting& m) {
    FileDescriptor fd = try_connect(m);
    while (!fd) {
        if (m.on_wait) m.on_wait();
        if (steady_clock::now() >= m.deadline) {
            throw CommunicatorError(ErrorKind::timeout,
                                    where(m) +
                                        "did not come in time: rank 0. Start all ranks of "
                                        "job '" +
                                        m.job + "' on this host.",
                                    {0});
        }
        std::this_thread::sleep_for(milliseconds(2));
        fd = try_connect(m);
    }
    // Rank 0 answers at its own deadline at the latest; a little grace lets its words arrive.
    Meeting patient = m;
    patient.deadline += milliseconds(500);
    if (!wait_for(patient, fd.get(), POLLIN)) {
        throw CommunicatorError(ErrorKind::timeout,
                                where(m) + "not all ranks came in time. Look at their output.");
    }
    return receive_memory(m, fd.get());
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
        reset();
        fd_ = other.release();
    }
    return *this;
}

int FileDescriptor::release() { return std::exchange(fd_, -1); }

void FileDescriptor::reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
}

FileDescriptor meet(const Meeting& meeting, size_t bytes) {
    return meeting.rank == 0 ? host(meeting, bytes) : join(meeting);
}

}  // namespace tagi_ddp
