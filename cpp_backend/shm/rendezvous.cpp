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
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/errors.h"
#include "shm/texts.h"

namespace tagi_ddp {
namespace {

using std::chrono::milliseconds;

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

[[noreturn]] void fail(const Rendezvous& rendezvous, ErrorKind kind, const std::string& text,
                       std::vector<int> ranks = {}) {
    throw CommunicatorError(
        kind, where_text("init", rendezvous.rank, rendezvous.size, rendezvous.backend) + text,
        std::move(ranks));
}

[[noreturn]] void system_error(const Rendezvous& rendezvous, const char* call) {
    fail(rendezvous, ErrorKind::unavailable,
         std::string(call) + " failed: " + std::strerror(errno) +
             ". Choose another backend, or mend what the system refuses.");
}

std::pair<sockaddr_un, socklen_t> address_of(const std::string& group) {
    const std::string name = "tagi_ddp/" + std::to_string(geteuid()) + "/" + group;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (name.size() >= sizeof address.sun_path) throw std::invalid_argument("name is too long");
    std::copy(name.begin(), name.end(), address.sun_path + 1);  // a leading 0: abstract
    return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

FileDescriptor make_socket(const Rendezvous& rendezvous) {
    FileDescriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) system_error(rendezvous, "socket");
    return fd;
}

// Waits for `events`; false when the deadline has passed.
bool wait_for(const Rendezvous& rendezvous, int fd, short events) {
    while (true) {
        if (rendezvous.on_wait) rendezvous.on_wait();
        const auto left = rendezvous.deadline - Clock::now();
        if (left <= Clock::duration::zero()) return false;
        pollfd entry{fd, events, 0};
        const auto step = std::min(std::chrono::duration_cast<milliseconds>(left), look_around);
        if (poll(&entry, 1, static_cast<int>(step.count()) + 1) > 0) return true;
    }
}

// The other side's user; the kernel says so, not the other side.
uid_t user_of(int fd) {
    ucred credentials{};
    socklen_t length = sizeof credentials;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
        return static_cast<uid_t>(-1);
    return credentials.uid;
}

bool same_user(int fd) { return user_of(fd) == geteuid(); }

[[noreturn]] void fail_as_refused(const Rendezvous& rendezvous, Reply reply) {
    reply.text[text_bytes - 1] = '\0';
    fail(rendezvous, static_cast<ErrorKind>(reply.kind - 1),
         std::string("refused by rank 0: ") + reply.text,
         reply.culprit < 0 ? std::vector<int>{} : std::vector<int>{reply.culprit});
}

[[noreturn]] void fail_as_taken(const Rendezvous& rendezvous, uid_t user) {
    fail(rendezvous, ErrorKind::unavailable,
         "the name of job '" + rendezvous.job + "' is taken by the user with number " +
             std::to_string(user) +
             ". Set TAGI_DDP_SECRET to the same random text on all ranks, which nobody else "
             "knows.");
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
    // A rank that has gone meanwhile is noticed by its claim, or by the first operation.
    (void)sendmsg(fd, &message, MSG_NOSIGNAL);
}

Reply refusal(const CommunicatorError& error) {
    Reply reply{};
    reply.kind = static_cast<uint32_t>(error.kind()) + 1;
    reply.culprit = error.ranks().empty() ? -1 : error.ranks().front();
    std::strncpy(reply.text, error.what(), text_bytes - 1);
    return reply;
}

FileDescriptor make_memory(const Rendezvous& rendezvous, size_t bytes) {
    FileDescriptor memory(memfd_create("tagi_ddp", MFD_CLOEXEC));
    if (!memory) system_error(rendezvous, "memfd_create");
    if (fchmod(memory.get(), S_IRUSR | S_IWUSR) != 0) system_error(rendezvous, "fchmod");
    if (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0)
        system_error(rendezvous, "ftruncate");
    return memory;
}

// Connects to who holds the group's name; nothing if nobody does, or it takes nobody more.
FileDescriptor connect_to(const Rendezvous& rendezvous) {
    FileDescriptor fd = make_socket(rendezvous);
    const auto [address, length] = address_of(rendezvous.name);
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) return fd;
    if (errno != ECONNREFUSED && errno != ENOENT && errno != EAGAIN)
        system_error(rendezvous, "connect");
    return FileDescriptor();
}

// Tells a rank 0 that still waits that there is another; it refuses both, before their ranks mix.
void announce_to_another(const Rendezvous& rendezvous) {
    const FileDescriptor fd = connect_to(rendezvous);
    if (!fd || !same_user(fd.get())) return;
    const Hello hello{0, static_cast<uint32_t>(rendezvous.size)};
    if (send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return;
    Reply reply{};
    // No answer: its ranks have come, and it has given up the name.
    if (!wait_for(rendezvous, fd.get(), POLLIN) ||
        recv(fd.get(), &reply, sizeof reply, 0) != sizeof reply)
        return;
    fail_as_refused(rendezvous, reply);
}

// Binds the job's name, waiting while an earlier group of the same name still holds it.
FileDescriptor listen_at(const Rendezvous& rendezvous) {
    FileDescriptor listener = make_socket(rendezvous);
    const auto [address, length] = address_of(rendezvous.name);
    while (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
        if (errno != EADDRINUSE) system_error(rendezvous, "bind");
        announce_to_another(rendezvous);
        if (rendezvous.on_wait) rendezvous.on_wait();
        if (Clock::now() >= rendezvous.deadline) {
            const FileDescriptor holder = connect_to(rendezvous);
            if (holder && !same_user(holder.get()))
                fail_as_taken(rendezvous, user_of(holder.get()));
            fail(rendezvous, ErrorKind::mismatch,
                 "another rank 0 of job '" + rendezvous.job +
                     "' is there already. Give every rank its own number, and "
                     "every job of this user its own TAGI_DDP_JOB.",
                 {0});
        }
        std::this_thread::sleep_for(milliseconds(5));
    }
    if (listen(listener.get(), std::max(rendezvous.size, 16)) != 0)
        system_error(rendezvous, "listen");
    return listener;
}

void check(const Rendezvous& rendezvous, const Hello& hello,
           const std::vector<FileDescriptor>& peers) {
    const int rank = static_cast<int>(hello.rank);
    if (hello.size != static_cast<uint32_t>(rendezvous.size)) {
        fail(rendezvous, ErrorKind::mismatch,
             "rank " + std::to_string(rank) + " says world size " + std::to_string(hello.size) +
                 ", rank 0 says " + std::to_string(rendezvous.size) + ". Give all ranks the same.",
             {rank});
    }
    if (rank < 1 || rank >= rendezvous.size || peers[static_cast<size_t>(rank)]) {
        fail(rendezvous, ErrorKind::mismatch,
             "rank " + std::to_string(rank) +
                 " came twice. Give every rank its own number, and every job of "
                 "this user its own TAGI_DDP_JOB.",
             {rank});
    }
}

void accept_all(const Rendezvous& rendezvous, int listener, std::vector<FileDescriptor>& peers) {
    for (int missing = rendezvous.size - 1; missing > 0;) {
        if (!wait_for(rendezvous, listener, POLLIN)) {
            std::vector<int> absent;
            std::string names;
            for (int r = 1; r < rendezvous.size; ++r) {
                if (peers[static_cast<size_t>(r)]) continue;
                absent.push_back(r);
                names += (names.empty() ? "" : ", ") + std::to_string(r);
            }
            fail(rendezvous, ErrorKind::timeout,
                 "did not come in time: rank " + names +
                     ". Look at its output; raise timeout= if it is only slow.",
                 absent);
        }
        FileDescriptor peer(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        Hello hello{};
        // A rank says hello as it connects; others that connect are none of ours.
        if (!peer || !same_user(peer.get())) continue;
        if (!wait_for(rendezvous, peer.get(), POLLIN)) continue;
        if (recv(peer.get(), &hello, sizeof hello, 0) != sizeof hello) continue;
        try {
            check(rendezvous, hello, peers);
        } catch (const CommunicatorError& error) {
            answer(peer.get(), refusal(error), -1);
            throw;
        }
        peers[hello.rank] = std::move(peer);
        --missing;
    }
}

// Waits until all ranks have claimed their part of the memory.
void await_claims(const Rendezvous& rendezvous, const std::vector<FileDescriptor>& peers) {
    for (int r = 1; r < rendezvous.size; ++r) {
        const int fd = peers[static_cast<size_t>(r)].get();
        char claimed = 0;
        if (!wait_for(rendezvous, fd, POLLIN)) {
            fail(rendezvous, ErrorKind::timeout,
                 "did not come in time: rank " + std::to_string(r) +
                     ". Look at its output; raise timeout= if it is only slow.",
                 {r});
        }
        if (recv(fd, &claimed, sizeof claimed, 0) != sizeof claimed)
            fail(rendezvous, ErrorKind::peer_lost, died_text({r}), {r});
    }
}

FileDescriptor host(const Rendezvous& rendezvous, size_t bytes,
                    const std::function<void(int)>& claim) {
    FileDescriptor listener = listen_at(rendezvous);
    FileDescriptor memory = make_memory(rendezvous, bytes);
    claim(memory.get());
    std::vector<FileDescriptor> peers(static_cast<size_t>(rendezvous.size));
    try {
        accept_all(rendezvous, listener.get(), peers);
        for (int r = 1; r < rendezvous.size; ++r)
            answer(peers[static_cast<size_t>(r)].get(), Reply{}, memory.get());
        await_claims(rendezvous, peers);
    } catch (const CommunicatorError& error) {
        for (const auto& peer : peers) {
            if (peer) answer(peer.get(), refusal(error), -1);
        }
        throw;
    }
    for (int r = 1; r < rendezvous.size; ++r)
        answer(peers[static_cast<size_t>(r)].get(), Reply{}, -1);
    return memory;
}

// Connects to rank 0 and says hello; nothing if rank 0 is not there, but `stranger` is set if
// another user is.
FileDescriptor try_connect(const Rendezvous& rendezvous, std::optional<uid_t>& stranger) {
    FileDescriptor fd = connect_to(rendezvous);
    if (!fd) return fd;
    if (!same_user(fd.get())) {
        stranger = user_of(fd.get());
        return FileDescriptor();
    }
    const Hello hello{static_cast<uint32_t>(rendezvous.rank),
                      static_cast<uint32_t>(rendezvous.size)};
    if (send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return FileDescriptor();
    return fd;
}

// Waits for rank 0's answer; returns the descriptor that came along, if one did.
FileDescriptor receive_answer(const Rendezvous& rendezvous, int fd) {
    // Rank 0 answers at its own deadline at the latest; a little grace lets its words arrive.
    Rendezvous patient = rendezvous;
    patient.deadline += milliseconds(500);
    if (!wait_for(patient, fd, POLLIN)) {
        fail(rendezvous, ErrorKind::timeout,
             "rank 0 is there, but did not answer in time. Look at that rank's output.", {0});
    }
    Reply reply{};
    iovec part{&reply, sizeof reply};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t received = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    // Rank 0 has closed without reading this rank's claim; its answer is still there.
    if (received < 0 && errno == ECONNRESET) received = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (received != sizeof reply) {
        fail(rendezvous, ErrorKind::peer_lost, "rank 0 went away. Look at that rank's output.",
             {0});
    }
    if (reply.kind != 0) fail_as_refused(rendezvous, reply);
    int memory = -1;
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
        std::memcpy(&memory, CMSG_DATA(header), sizeof memory);
    }
    return FileDescriptor(memory);
}

FileDescriptor join(const Rendezvous& rendezvous, const std::function<void(int)>& claim) {
    std::optional<uid_t> stranger;
    FileDescriptor fd = try_connect(rendezvous, stranger);
    while (!fd) {
        if (rendezvous.on_wait) rendezvous.on_wait();
        if (Clock::now() >= rendezvous.deadline) {
            if (stranger) fail_as_taken(rendezvous, *stranger);
            fail(rendezvous, ErrorKind::timeout,
                 "did not come in time: rank 0. Start all ranks of "
                 "job '" +
                     rendezvous.job + "' on this host.",
                 {0});
        }
        std::this_thread::sleep_for(milliseconds(2));
        fd = try_connect(rendezvous, stranger);
    }
    FileDescriptor memory = receive_answer(rendezvous, fd.get());
    if (!memory) system_error(rendezvous, "receiving the memory file");
    claim(memory.get());
    const char claimed = 1;
    // If rank 0 has gone meanwhile there is no answer, either.
    (void)send(fd.get(), &claimed, sizeof claimed, MSG_NOSIGNAL);
    (void)receive_answer(rendezvous, fd.get());
    return memory;
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

FileDescriptor share_memory(const Rendezvous& rendezvous, size_t bytes,
                            const std::function<void(int)>& claim) {
    return rendezvous.rank == 0 ? host(rendezvous, bytes, claim) : join(rendezvous, claim);
}

}  // namespace tagi_ddp
