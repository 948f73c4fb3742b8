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
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <thread>

#include "shm/texts.h"

namespace tagi_ddp {
namespace {

using std::chrono::milliseconds;

constexpr size_t text_bytes = 480;
constexpr size_t version_bytes = 40;
constexpr std::chrono::seconds refusal_time{2};  // for which rank 0 refuses ranks that come later
constexpr const char* own_numbers =
    ". Give every rank its own number, and every job of this user its own TAGI_DDP_JOB.";

// The first message of a rank to rank 0.
struct Hello {
    uint32_t rank;
    uint32_t size;
    char version[version_bytes];
};

Hello hello_of(const Rendezvous& rendezvous) {
    Hello hello{static_cast<uint32_t>(rendezvous.rank), static_cast<uint32_t>(rendezvous.size), {}};
    rendezvous.version.copy(hello.version, version_bytes - 1);
    return hello;
}

// Rank 0's answer; if it is no error, the descriptor of the memory file may be attached.
struct Reply {
    uint32_t kind;  // ErrorKind + 1; 0 for no error
    int32_t culprit;
    char text[text_bytes];
};

[[noreturn]] void system_error(const Rendezvous& rendezvous, const char* call) {
    fail(rendezvous, ErrorKind::unavailable,
         std::string(call) + " failed: " + std::strerror(errno) +
             ". Choose another backend, or correct what the system refuses.");
}

std::pair<sockaddr_un, socklen_t> address_of(const std::string& group) {
    const std::string name = "tagi_ddp/" + std::to_string(geteuid()) + "/" + group;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (name.size() >= sizeof address.sun_path) throw std::invalid_argument("name is too long");
    std::copy(name.begin(), name.end(), address.sun_path + 1);  // abstract: begins with a 0
    return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

FileDescriptor make_socket(const Rendezvous& rendezvous) {
    FileDescriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) system_error(rendezvous, "socket");
    return fd;
}

// Waits for `events`; returns false if the deadline passes.
bool wait_for(const Rendezvous& rendezvous, int fd, short events) {
    while (true) {
        if (rendezvous.on_wait) rendezvous.on_wait();
        const auto left = rendezvous.deadline - Clock::now();
        if (left <= Clock::duration::zero()) return false;
        pollfd entry{fd, events, 0};
        const auto step = std::min(std::chrono::duration_cast<milliseconds>(left), check_interval);
        if (poll(&entry, 1, static_cast<int>(step.count()) + 1) > 0) return true;
    }
}

// The user of the process at the other end, which the kernel guarantees.
uid_t user_of(int fd) {
    ucred credentials{};
    socklen_t length = sizeof credentials;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
        return static_cast<uid_t>(-1);
    return credentials.uid;
}

bool same_user(int fd) { return user_of(fd) == geteuid(); }

[[noreturn]] void fail_refused(const Rendezvous& rendezvous, Reply reply) {
    reply.text[text_bytes - 1] = '\0';
    fail(rendezvous, static_cast<ErrorKind>(reply.kind - 1),
         std::string("refused by rank 0: ") + reply.text,
         reply.culprit < 0 ? std::vector<int>{} : std::vector<int>{reply.culprit});
}

[[noreturn]] void fail_name_taken(const Rendezvous& rendezvous, uid_t user) {
    fail(rendezvous, ErrorKind::unavailable,
         "the name of job '" + rendezvous.job + "' is taken by the user with number " +
             std::to_string(user) +
             ". Set TAGI_DDP_SECRET to the same random text on all ranks, which nobody else "
             "knows.");
}

[[noreturn]] void fail_missing(const Rendezvous& rendezvous, const std::vector<int>& ranks,
                               const std::string& remedy = "") {
    fail(rendezvous, ErrorKind::timeout, timeout_text(ranks, rendezvous.timeout) + remedy, ranks);
}

// A message of one Reply, with room for a descriptor.
struct Message {
    explicit Message(Reply& reply) : part{&reply, sizeof reply} {
        header.msg_iov = &part;
        header.msg_iovlen = 1;
        header.msg_control = control;
        header.msg_controllen = sizeof control;
    }

    iovec part;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
};

void answer(int fd, Reply reply, int memory = -1) {
    Message message(reply);
    if (memory >= 0) {
        cmsghdr* header = CMSG_FIRSTHDR(&message.header);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(header), &memory, sizeof memory);
    } else {
        message.header.msg_controllen = 0;
    }
    // If the rank has died, its missing claim or the first operation shows it.
    (void)sendmsg(fd, &message.header, MSG_NOSIGNAL);
}

Reply refusal(const CommunicatorError& error) {
    Reply reply{};
    reply.kind = static_cast<uint32_t>(error.kind()) + 1;
    reply.culprit = error.ranks().empty() ? -1 : error.ranks().front();
    std::strncpy(reply.text, error.what(), text_bytes - 1);
    return reply;
}

void answer_all(const std::vector<FileDescriptor>& peers, const Reply& reply, int memory = -1) {
    for (const FileDescriptor& peer : peers) {
        if (peer) answer(peer.get(), reply, memory);
    }
}

FileDescriptor make_memory(const Rendezvous& rendezvous, size_t bytes) {
    FileDescriptor memory(memfd_create("tagi_ddp", MFD_CLOEXEC));
    if (!memory) system_error(rendezvous, "memfd_create");
    if (fchmod(memory.get(), S_IRUSR | S_IWUSR) != 0) system_error(rendezvous, "fchmod");
    if (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0)
        system_error(rendezvous, "ftruncate");
    return memory;
}

// Connects to the holder of the group's name; empty if there is none, or its queue is full.
FileDescriptor connect_to(const Rendezvous& rendezvous) {
    FileDescriptor fd = make_socket(rendezvous);
    const auto [address, length] = address_of(rendezvous.name);
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) return fd;
    if (errno != ECONNREFUSED && errno != ENOENT && errno != EAGAIN)
        system_error(rendezvous, "connect");
    return FileDescriptor();
}

// Says hello to a rank 0 that still waits for its ranks. It refuses both, before their ranks mix.
void announce_to_holder(const Rendezvous& rendezvous) {
    const FileDescriptor fd = connect_to(rendezvous);
    if (!fd || !same_user(fd.get())) return;
    const Hello hello = hello_of(rendezvous);
    if (send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return;
    Reply reply{};
    // Without an answer, its ranks have joined and it has released the name.
    if (!wait_for(rendezvous, fd.get(), POLLIN) ||
        recv(fd.get(), &reply, sizeof reply, 0) != sizeof reply)
        return;
    fail_refused(rendezvous, reply);
}

// Binds the group's name; waits while an earlier group of the same name holds it.
FileDescriptor listen_at(const Rendezvous& rendezvous) {
    FileDescriptor listener = make_socket(rendezvous);
    const auto [address, length] = address_of(rendezvous.name);
    while (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
        if (errno != EADDRINUSE) system_error(rendezvous, "bind");
        announce_to_holder(rendezvous);
        if (rendezvous.on_wait) rendezvous.on_wait();
        if (Clock::now() >= rendezvous.deadline) {
            const FileDescriptor holder = connect_to(rendezvous);
            if (holder && !same_user(holder.get()))
                fail_name_taken(rendezvous, user_of(holder.get()));
            fail(rendezvous, ErrorKind::mismatch,
                 "job '" + rendezvous.job + "' has another rank 0" + own_numbers, {0});
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
    const std::string own = hello_of(rendezvous).version;
    if (own != hello.version) {
        fail(rendezvous, ErrorKind::mismatch,
             "rank " + std::to_string(rank) + " has tagi_ddp " + hello.version + ", rank 0 has " +
                 own + ". Install the same version for all ranks.",
             {rank});
    }
    if (hello.size != static_cast<uint32_t>(rendezvous.size)) {
        fail(rendezvous, ErrorKind::mismatch,
             "rank " + std::to_string(rank) + " has world size " + std::to_string(hello.size) +
                 ", rank 0 has " + std::to_string(rendezvous.size) + ". Give all ranks the same.",
             {rank});
    }
    if (rank < 1 || rank >= rendezvous.size || peers[static_cast<size_t>(rank)]) {
        fail(rendezvous, ErrorKind::mismatch,
             "two ranks have number " + std::to_string(rank) + own_numbers, {rank});
    }
}

// Accepts a rank, and reads the hello that it sends when it connects. Returns an empty descriptor
// for a connection of another program.
FileDescriptor accept_one(const Rendezvous& rendezvous, int listener, Hello& hello) {
    FileDescriptor peer(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!peer || !same_user(peer.get())) return FileDescriptor();
    if (!wait_for(rendezvous, peer.get(), POLLIN)) return FileDescriptor();
    hello = Hello{};
    std::string("(earlier)").copy(hello.version, version_bytes);  // which sends none
    const ssize_t received = recv(peer.get(), &hello, sizeof hello, 0);
    if (received < static_cast<ssize_t>(offsetof(Hello, version))) return FileDescriptor();
    hello.version[version_bytes - 1] = '\0';
    return peer;
}

// Refuses all ranks, one of which has been refused; others come at about the same time.
void refuse_all(Rendezvous rendezvous, int listener, const std::vector<FileDescriptor>& peers,
                const Reply& reply) {
    answer_all(peers, reply);
    auto missing = rendezvous.size - 2;
    for (const FileDescriptor& peer : peers) missing -= bool(peer);
    rendezvous.deadline = std::min(rendezvous.deadline, Clock::now() + refusal_time);
    while (missing > 0 && wait_for(rendezvous, listener, POLLIN)) {
        Hello hello{};
        const FileDescriptor peer = accept_one(rendezvous, listener, hello);
        if (!peer) continue;
        answer(peer.get(), reply);
        --missing;
    }
}

void accept_all(const Rendezvous& rendezvous, int listener, std::vector<FileDescriptor>& peers) {
    for (int missing = rendezvous.size - 1; missing > 0;) {
        if (!wait_for(rendezvous, listener, POLLIN)) {
            std::vector<int> absent;
            for (int r = 1; r < rendezvous.size; ++r) {
                if (!peers[static_cast<size_t>(r)]) absent.push_back(r);
            }
            fail_missing(rendezvous, absent);
        }
        Hello hello{};
        FileDescriptor peer = accept_one(rendezvous, listener, hello);
        if (!peer) continue;
        try {
            check(rendezvous, hello, peers);
        } catch (const CommunicatorError& error) {
            answer(peer.get(), refusal(error));
            throw;
        }
        peers[hello.rank] = std::move(peer);
        --missing;
    }
}

// Waits until all ranks have returned from their claims.
void await_claims(const Rendezvous& rendezvous, const std::vector<FileDescriptor>& peers) {
    for (int r = 1; r < rendezvous.size; ++r) {
        const int fd = peers[static_cast<size_t>(r)].get();
        char claimed = 0;
        if (!wait_for(rendezvous, fd, POLLIN)) fail_missing(rendezvous, {r});
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
        answer_all(peers, Reply{}, memory.get());
        await_claims(rendezvous, peers);
    } catch (const CommunicatorError& error) {
        if (error.kind() == ErrorKind::mismatch)
            refuse_all(rendezvous, listener.get(), peers, refusal(error));
        else
            answer_all(peers, refusal(error));
        throw;
    }
    answer_all(peers, Reply{});
    return memory;
}

// Connects to rank 0 and sends a hello; empty if rank 0 does not listen. Sets `other_user` if a
// process of another user does.
FileDescriptor try_connect(const Rendezvous& rendezvous, std::optional<uid_t>& other_user) {
    FileDescriptor fd = connect_to(rendezvous);
    if (!fd) return fd;
    if (!same_user(fd.get())) {
        other_user = user_of(fd.get());
        return FileDescriptor();
    }
    const Hello hello = hello_of(rendezvous);
    if (send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return FileDescriptor();
    return fd;
}

// Waits for rank 0's answer; returns the attached descriptor, if there is one.
FileDescriptor receive_answer(const Rendezvous& rendezvous, int fd) {
    // Rank 0 answers by its own deadline, which may be a little later than this rank's.
    Rendezvous extended = rendezvous;
    extended.deadline += milliseconds(500);
    if (!wait_for(extended, fd, POLLIN)) {
        fail(rendezvous, ErrorKind::timeout,
             "rank 0 is there, but did not answer in time. Look at that rank's output.", {0});
    }
    Reply reply{};
    Message message(reply);
    ssize_t received = recvmsg(fd, &message.header, MSG_CMSG_CLOEXEC);
    // Rank 0 closed the connection without reading this rank's claim. Its answer can still be read.
    if (received < 0 && errno == ECONNRESET)
        received = recvmsg(fd, &message.header, MSG_CMSG_CLOEXEC);
    if (received != sizeof reply) {
        fail(rendezvous, ErrorKind::peer_lost,
             "rank 0 closed the connection. Look at that rank's output.", {0});
    }
    if (reply.kind != 0) fail_refused(rendezvous, reply);
    int memory = -1;
    const cmsghdr* header = CMSG_FIRSTHDR(&message.header);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
        std::memcpy(&memory, CMSG_DATA(header), sizeof memory);
    }
    return FileDescriptor(memory);
}

FileDescriptor join(const Rendezvous& rendezvous, const std::function<void(int)>& claim) {
    std::optional<uid_t> other_user;
    FileDescriptor fd = try_connect(rendezvous, other_user);
    while (!fd) {
        if (rendezvous.on_wait) rendezvous.on_wait();
        if (Clock::now() >= rendezvous.deadline) {
            if (other_user) fail_name_taken(rendezvous, *other_user);
            fail_missing(rendezvous, {0},
                         " Start all ranks of job '" + rendezvous.job + "' on this host.");
        }
        std::this_thread::sleep_for(milliseconds(2));
        fd = try_connect(rendezvous, other_user);
    }
    FileDescriptor memory = receive_answer(rendezvous, fd.get());
    if (!memory) system_error(rendezvous, "receiving the memory file");
    claim(memory.get());
    const char claimed = 1;
    // An error means that rank 0 has died. Then the next answer is missing too.
    (void)send(fd.get(), &claimed, sizeof claimed, MSG_NOSIGNAL);
    (void)receive_answer(rendezvous, fd.get());
    return memory;
}

}  // namespace

FileDescriptor::~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
}

void fail(const Rendezvous& rendezvous, ErrorKind kind, const std::string& text,
          std::vector<int> ranks) {
    throw CommunicatorError(
        kind, where_text("init", rendezvous.rank, rendezvous.size, rendezvous.backend) + text,
        std::move(ranks));
}

FileDescriptor share_memory(const Rendezvous& rendezvous, size_t bytes,
                            const std::function<void(int)>& claim) {
    return rendezvous.rank == 0 ? host(rendezvous, bytes, claim) : join(rendezvous, claim);
}

}  // namespace tagi_ddp
