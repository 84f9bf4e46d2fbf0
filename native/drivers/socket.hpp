// A UDP socket that moves many packets per system call: sendmmsg and recvmmsg, and segmentation offload (GSO,
// GRO) where the kernel has it. It does not block. It knows datagrams and addresses, and nothing of the
// protocol's meaning.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "drivers/multicast.hpp"
#include "protocol/ops/op.hpp"

namespace tailcut {

struct Address {
    std::uint32_t ipv4 = 0;  // host order
    std::uint16_t port = 0;
    bool operator==(const Address&) const = default;
};

struct SocketCounters {
    std::uint64_t send_calls = 0, receive_calls = 0, segmented_sends = 0, coalesced_receives = 0;
    std::uint64_t blocked_sends = 0;  // EAGAIN or ENOBUFS: sent later
    std::uint64_t failed_sends = 0;   // any other error: the datagram is lost
};

class Socket {
public:
    static constexpr std::size_t kMaxDatagramBytes = 65'507;
    static constexpr std::size_t kBatchPackets = 64;
    // Messages per call: few large ones, so that their buffers stay in the L2 cache, or many small ones.
    static constexpr std::size_t kFewestMessages = 8, kMostMessages = 32, kReceiveBytes = 512 * 1024;

    // Throws std::system_error when it cannot bind.
    Socket(std::uint32_t bind_ipv4, std::uint32_t receive_buffer_bytes, bool offload);
    ~Socket() { close(); }
    Socket(const Socket&) = delete;
    Socket& operator=(const Socket&) = delete;

    void close();
    void mark(int dscp);
    // From now on also receives what is sent to the group, and sends to it through the group's interface.
    // Leaves the group joined before. Throws std::system_error, and is then a member of no group.
    void join(const MulticastGroup& group);
    void leave();
    int descriptor() const { return descriptor_; }
    int group_descriptor() const { return group_descriptor_; }  // -1: no group was joined
    const Address& group_address() const { return group_address_; }
    std::uint16_t port() const { return port_; }
    std::uint32_t receive_buffer_bytes() const { return receive_buffer_bytes_; }  // as the kernel reports it
    // How many bytes may wait in the kernel to be received.
    std::size_t most_waiting_bytes() const {
        return std::size_t{receive_buffer_bytes_} * (group_descriptor_ >= 0 ? 2 : 1);
    }
    bool segments() const { return segments_; }
    const SocketCounters& counters() const { return counters_; }

    // Calls recvmmsg for the group first, and for the socket only if the group had no more: a unicast request
    // that follows a multicast packet must not overtake it. Hands every datagram and its source address to
    // `visit`. Returns whether there may be more. Throws std::system_error if the descriptor is not a socket
    // any more.
    template <typename Visit>
    bool receive(Visit visit) {
        const bool skipped = group_turns_ >= kGroupTurns;
        if (group_descriptor_ >= 0 && !skipped && receive_from(group_descriptor_, visit)) {
            ++group_turns_;
            return true;
        }
        group_turns_ = 0;
        return receive_from(descriptor_, visit) || skipped;
    }

    // Sends the packets in order. Returns how many were dealt with; the rest found the socket full.
    std::size_t send(std::span<const Outgoing> packets, std::span<const Address> addresses);

private:
    static constexpr std::size_t kBufferBytes = 65'536;
    static constexpr int kGroupTurns = 16;  // in a row, while the socket waits

    template <typename Visit>
    bool receive_from(int descriptor, Visit& visit) {
        const std::size_t asked = std::clamp(kReceiveBytes / longest_, kFewestMessages, kMostMessages);
        const std::size_t messages = receive_batch(descriptor, asked);
        for (std::size_t m = 0; m < messages; ++m) {
            const std::span<const std::byte> all(buffers_[m].data(), lengths_[m]);
            const std::size_t segment = segment_bytes_[m] ? segment_bytes_[m] : all.size();
            std::size_t at = 0;
            do {  // an empty datagram counts as one
                visit(all.subspan(at, std::min(segment, all.size() - at)), sources_[m]);
                at += segment;
            } while (at < all.size());
        }
        return messages == asked;
    }

    std::size_t receive_batch(int descriptor, std::size_t most);
    std::size_t group(std::span<const Outgoing> packets) const;

    int descriptor_ = -1, group_descriptor_ = -1;
    std::uint16_t port_ = 0;
    Address group_address_;
    std::uint32_t asked_buffer_bytes_;
    std::uint32_t receive_buffer_bytes_ = 0;
    bool segments_ = false, coalesces_ = false;
    int group_turns_ = 0;
    SocketCounters counters_;

    struct alignas(64) Buffer : std::array<std::byte, kBufferBytes> {};
    // Only pages that were received into are ever used.
    std::vector<Buffer> buffers_{kMostMessages};
    std::array<std::size_t, kMostMessages> lengths_{}, segment_bytes_{};
    std::array<Address, kMostMessages> sources_;
    std::size_t longest_ = kBufferBytes;  // longest message of the last call that received any
};

}  // namespace tailcut
