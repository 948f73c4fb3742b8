// The operations of ShmCommunicator.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/hash.h"
#include "shm/reduce.h"
#include "shm/shm_communicator.h"

namespace tagi_ddp {
namespace {

constexpr size_t small_bytes = 16 * 1024;

uint32_t chunks_for(size_t bytes) {
    return static_cast<uint32_t>((bytes + slot_bytes - 1) / slot_bytes);
}

// memcpy with a null pointer is undefined behaviour, even for 0 bytes.
void copy_bytes(void* to, const void* from, size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
}

// The layout of chunks that hold a part for each other rank: chunk k has piece k of every part,
// side by side, so every rank reads from every chunk. A rank's own part is not sent.
class PartLayout {
 public:
    PartLayout(int rank, int size)
        : rank_(static_cast<size_t>(rank)),
          piece_(slot_bytes / static_cast<size_t>(std::max(size - 1, 1)) / 64 * 64) {}

    uint32_t chunks_for(size_t part_bytes) const {
        return static_cast<uint32_t>((part_bytes + piece_ - 1) / piece_);
    }
    // The size of piece `chunk` of a part, and its offset in the part.
    size_t bytes(uint32_t chunk, size_t part_bytes) const {
        return std::min(piece_, part_bytes - std::min(part_bytes, begin(chunk)));
    }
    size_t begin(uint32_t chunk) const { return chunk * piece_; }
    // The offset, in a slot of rank `from`, of the piece for rank `to`.
    size_t offset(size_t from, size_t to) const { return (to < from ? to : to - 1) * piece_; }

    // Writes piece `chunk` of the other ranks' parts of `data`, which are in rank order.
    void fill(uint32_t chunk, const std::byte* data, const std::vector<size_t>& parts,
              std::byte* slot) const {
        for (size_t r = 0; r < parts.size(); data += parts[r++]) {
            const size_t count = r == rank_ ? 0 : bytes(chunk, parts[r]);
            if (count != 0) std::memcpy(slot + offset(rank_, r), data + begin(chunk), count);
        }
    }

 private:
    size_t rank_;
    size_t piece_;
};

// The destination of the bytes that a rank's chunks hold.
struct Destination {
    std::byte* data;
    size_t bytes;

    void copy(uint32_t chunk, const std::byte* slot) const {
        const size_t begin = static_cast<size_t>(chunk) * slot_bytes;
        if (begin < bytes) std::memcpy(data + begin, slot, std::min(slot_bytes, bytes - begin));
    }
};

std::string name_message(DType dtype, size_t bytes, int tag) {
    return std::string(name_of(dtype)) + "[" + std::to_string(bytes / size_of(dtype)) +
           "] with tag " + std::to_string(tag);
}

// The numbers of chunks of an exchange in which they are equal on all ranks.
std::vector<uint32_t> equal_chunks(int ranks, uint32_t chunks) {
    return std::vector<uint32_t>(static_cast<size_t>(ranks), chunks);
}

// Returns a function that fills slots with successive chunks of [data, data + bytes).
std::function<void(uint32_t, std::byte*)> stream(const std::byte* data, size_t bytes) {
    return [data, bytes](uint32_t chunk, std::byte* slot) {
        const size_t begin = static_cast<size_t>(chunk) * slot_bytes;
        std::memcpy(slot, data + begin, std::min(slot_bytes, bytes - begin));
    };
}

}  // namespace

void ShmCommunicator::all_reduce(const Buffer& in, const Buffer& out, ReduceOp op, double timeout) {
    Signature signature{Kind::all_reduce, in.dtype, op};
    signature.count = in.count;
    const size_t element = size_of(in.dtype);
    if (in.data == out.data && is_in_place(in, signature)) {
        const auto reduce_share = [&](const std::vector<std::byte*>& parts) {
            const size_t n = static_cast<size_t>(size_);
            const size_t me = static_cast<size_t>(rank_);
            const Shard own = shard_of(in.count, element, rank_, size_);
            const size_t end = own.begin + own.count;
            const size_t block = 32 * 1024 / element;
            std::vector<const std::byte*> sources(n);
            for (size_t at = own.begin; at < end; at += block) {
                const size_t count = std::min(block, end - at);
                const size_t offset = at * element;
                for (size_t i = 0; i < n; ++i) sources[i] = parts[i] + offset;
                reduce(in.dtype, op, sources.data(), size_, parts[me] + offset, count);
                for (size_t i = 0; i < n; ++i) {
                    if (i != me) std::memcpy(parts[i] + offset, sources[me], count * element);
                }
            }
        };
        exchange({signature, in, nullptr, {reduce_share}}, timeout);
        return;
    }
    PipelinedExchange plan{signature, equal_chunks(size_, chunks_for(in.bytes())),
                           stream(in.byte_data(), in.bytes())};
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        const size_t begin = static_cast<size_t>(chunk) * slot_bytes;
        reduce(in.dtype, op, slots, size_, out.byte_data() + begin,
               std::min(slot_bytes, in.bytes() - begin) / element);
    };
    exchange(plan, timeout);
}

bool ShmCommunicator::is_in_place(const Buffer& buffer, Signature& signature) const {
    const auto location =
        segment_ ? segment_->find(buffer.byte_data(), buffer.bytes()) : std::nullopt;
    if (!location) return false;
    // In place, ranks wait for each other twice, through the slots once. With fewer cores than
    // ranks, a wait costs the most.
    if (has_cores_ || buffer.bytes() > small_bytes) return true;
    signature.detail += location->offset;
    return false;
}

void ShmCommunicator::broadcast(const Buffer& buffer, int root, double timeout) {
    Signature signature{Kind::broadcast, buffer.dtype, ReduceOp::sum, static_cast<uint32_t>(root)};
    signature.count = buffer.count;
    std::vector<uint32_t> chunks(static_cast<size_t>(size_));
    chunks[static_cast<size_t>(root)] = chunks_for(buffer.bytes());
    PipelinedExchange plan{signature, chunks, stream(buffer.byte_data(), buffer.bytes())};
    const Destination destination{buffer.byte_data(), buffer.bytes()};
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        if (rank_ != root) destination.copy(chunk, slots[root]);
    };
    exchange(plan, timeout);
}

void ShmCommunicator::all_gather(const Buffer& in, const Buffer& out,
                                 const std::vector<size_t>& counts, double timeout) {
    Signature signature{Kind::all_gather, in.dtype};
    signature.count = total(counts);
    signature.detail = hash_of(counts);
    const size_t element = size_of(in.dtype);
    std::vector<Destination> destinations;
    std::vector<uint32_t> chunks;
    size_t offset = 0;
    for (size_t count : counts) {
        destinations.push_back({out.byte_data() + offset, count * element});
        chunks.push_back(chunks_for(count * element));
        offset += count * element;
    }
    if (is_in_place(out, signature)) {
        const size_t begin =
            static_cast<size_t>(destinations[static_cast<size_t>(rank_)].data - out.byte_data());
        const auto write_own = [&](const std::vector<std::byte*>& parts) {
            for (std::byte* part : parts) copy_bytes(part + begin, in.data, in.bytes());
        };
        exchange({signature, out, nullptr, {write_own}}, timeout);
        return;
    }
    PipelinedExchange plan{signature, chunks, stream(in.byte_data(), in.bytes())};
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        for (size_t r = 0; r < destinations.size(); ++r) {
            if (slots[r] != nullptr) destinations[r].copy(chunk, slots[r]);
        }
    };
    exchange(plan, timeout);
}

void ShmCommunicator::reduce_scatter(const Buffer& in, const Buffer& out,
                                     const std::vector<size_t>& counts, ReduceOp op,
                                     double timeout) {
    Signature signature{Kind::reduce_scatter, in.dtype, op};
    signature.count = in.count;
    signature.detail = hash_of(counts);
    const size_t element = size_of(in.dtype);
    std::vector<size_t> parts;
    for (size_t count : counts) parts.push_back(count * element);
    const size_t me = static_cast<size_t>(rank_);
    const std::byte* own = std::accumulate(parts.begin(), parts.begin() + rank_, in.byte_data());
    std::vector<const std::byte*> sources(static_cast<size_t>(size_));
    if (is_in_place(in, signature)) {
        const auto reduce_part = [&](const std::vector<std::byte*>& buffers) {
            const auto begin = own - in.byte_data();
            for (size_t r = 0; r < buffers.size(); ++r) sources[r] = buffers[r] + begin;
            reduce(in.dtype, op, sources.data(), size_, out.byte_data(), parts[me] / element);
        };
        exchange({signature, in, nullptr, {reduce_part}}, timeout);
        return;
    }
    const PartLayout layout(rank_, size_);
    const uint32_t chunks = layout.chunks_for(*std::max_element(parts.begin(), parts.end()));
    const auto fill = [&](uint32_t chunk, std::byte* slot) {
        layout.fill(chunk, in.byte_data(), parts, slot);
    };
    PipelinedExchange plan{signature, equal_chunks(size_, chunks), fill};
    plan.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        const size_t bytes = layout.bytes(chunk, parts[me]);
        if (bytes == 0) return;
        const size_t begin = layout.begin(chunk);
        for (size_t r = 0; r < sources.size(); ++r) {
            sources[r] = r == me ? own + begin : slots[r] + layout.offset(r, me);
        }
        reduce(in.dtype, op, sources.data(), size_, out.byte_data() + begin, bytes / element);
    };
    exchange(plan, timeout);
}

void ShmCommunicator::all_to_all(const Buffer& in, const Buffer& out,
                                 const std::vector<size_t>& send_counts,
                                 const std::vector<size_t>& recv_counts, double timeout) {
    const Operation operation = begin_collective(Kind::all_to_all, timeout);
    const size_t n = static_cast<size_t>(size_);
    const size_t me = static_cast<size_t>(rank_);
    const Signature signature{Kind::all_to_all, in.dtype};

    // Exchange the counts first: they determine the position of a rank's part in each buffer.
    std::vector<uint64_t> own(send_counts.begin(), send_counts.end());
    own.insert(own.end(), recv_counts.begin(), recv_counts.end());
    const size_t own_bytes = own.size() * sizeof(uint64_t);
    std::vector<std::vector<uint64_t>> counts(n, own);
    PipelinedExchange first{signature, equal_chunks(size_, chunks_for(own_bytes)),
                            stream(reinterpret_cast<const std::byte*>(own.data()), own_bytes)};
    first.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        for (size_t r = 0; r < n; ++r) {
            const Destination destination{reinterpret_cast<std::byte*>(counts[r].data()),
                                          own_bytes};
            destination.copy(chunk, slots[r]);
        }
    };
    exchange(operation, first);
    for (size_t a = 0; a < n; ++a) {
        for (size_t b = 0; b < n; ++b) {
            const uint64_t sent = counts[a][b];
            const uint64_t expected = counts[b][n + a];
            if (sent == expected) continue;
            guarded(operation, [&] {
                raise(operation, ErrorKind::mismatch,
                      "rank " + std::to_string(a) + " sends " + std::to_string(sent) +
                          " elements to rank " + std::to_string(b) + ", which expects " +
                          std::to_string(expected) +
                          ". Set send_counts[b] of rank a to recv_counts[a] of rank b.",
                      {static_cast<int>(a == me ? b : a)});
            });
        }
    }

    const size_t element = size_of(in.dtype);
    std::vector<size_t> sent, received;  // bytes
    size_t longest = 0;
    for (size_t a = 0; a < n; ++a) {
        sent.push_back(counts[me][a] * element);
        received.push_back(counts[a][me] * element);
        for (size_t b = 0; b < n; ++b) {
            if (a != b) longest = std::max<size_t>(longest, counts[a][b] * element);
        }
    }
    const PartLayout layout(rank_, size_);
    const uint32_t chunks = layout.chunks_for(longest);
    const auto fill = [&](uint32_t chunk, std::byte* slot) {
        layout.fill(chunk, in.byte_data(), sent, slot);
    };
    PipelinedExchange second{signature, equal_chunks(size_, chunks), fill};
    second.consume = [&](uint32_t chunk, const std::byte* const* slots) {
        std::byte* to = out.byte_data();
        for (size_t r = 0; r < n; to += received[r++]) {
            const size_t count = r == me ? 0 : layout.bytes(chunk, received[r]);
            if (count == 0) continue;
            std::memcpy(to + layout.begin(chunk), slots[r] + layout.offset(r, me), count);
        }
    };
    exchange(operation, second);
    copy_bytes(std::accumulate(received.begin(), received.begin() + rank_, out.byte_data()),
               std::accumulate(sent.begin(), sent.begin() + rank_, in.byte_data()), sent[me]);
}

void ShmCommunicator::barrier(double timeout) {
    const Operation operation = begin_collective(Kind::barrier, timeout);
    guarded(operation, [&] { enter(operation, Signature{Kind::barrier}); });
}

void ShmCommunicator::send(const Buffer& buffer, int dst, int tag, double timeout) {
    const size_t peer = static_cast<size_t>(dst);
    const Operation operation =
        begin("send #" + std::to_string(++sent_[peer].messages) + " to rank " + std::to_string(dst),
              timeout);
    guarded(operation, [&] {
        Channel& channel = segment_->channel(rank_, dst);
        size_t at = 0;
        do {  // an empty message is one packet
            const uint32_t number = sent_[peer].packets;
            wait(operation, channel.received, number + 1 - num_packets, dst);
            const size_t bytes = std::min(packet_bytes, buffer.bytes() - at);
            channel.headers[number % num_packets] = {buffer.bytes(), buffer.dtype, tag};
            copy_bytes(segment_->packet(rank_, dst, number), buffer.byte_data() + at, bytes);
            at += bytes;
            channel.sent.advance(++sent_[peer].packets);
        } while (at < buffer.bytes());
    });
}

void ShmCommunicator::recv(const Buffer& buffer, int src, int tag, double timeout) {
    const size_t peer = static_cast<size_t>(src);
    const Operation operation = begin(
        "recv #" + std::to_string(++received_[peer].messages) + " from rank " + std::to_string(src),
        timeout);
    guarded(operation, [&] {
        Channel& channel = segment_->channel(src, rank_);
        size_t at = 0;
        do {
            const uint32_t number = received_[peer].packets;
            wait(operation, channel.sent, number + 1, src);
            const PacketHeader& header = channel.headers[number % num_packets];
            if (header.total_bytes != buffer.bytes() || header.tag != tag ||
                header.dtype != buffer.dtype) {
                raise(operation, ErrorKind::mismatch,
                      "rank " + std::to_string(src) + " sent " +
                          name_message(header.dtype, header.total_bytes, header.tag) +
                          ", this rank expects " + name_message(buffer.dtype, buffer.bytes(), tag) +
                          ". Receive messages in order, with the dtype, size and tag of each.",
                      {src});
            }
            const size_t bytes = std::min(packet_bytes, buffer.bytes() - at);
            copy_bytes(buffer.byte_data() + at, segment_->packet(src, rank_, number), bytes);
            at += bytes;
            channel.received.advance(++received_[peer].packets);
        } while (at < buffer.bytes());
    });
}

}  // namespace tagi_ddp
