#include "drivers/socket.hpp"

#include <netinet/udp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace tailcut {
namespace {

constexpr std::size_t kMaxSegments = 44;  // per kernel traversal: at most 64 segments and 64 KiB
constexpr std::size_t kControlBytes = CMSG_SPACE(sizeof(std::uint16_t)) + CMSG_SPACE(sizeof(int));

// The kernel counts this as 1 MiB, which is 455 packets of MTU 1500: well below the 1,000 that interfaces
// queue by default.
constexpr int kSendBufferBytes = 512 * 1024;

std::size_t datagram_bytes(const Outgoing& packet) { return wire::kHeaderBytes + packet.payload.size(); }

bool try_option(int descriptor, int level, int name, int value) {
    return ::setsockopt(descriptor, level, name, &value, sizeof value) == 0;
}

void ask_receive_buffer(int descriptor, std::uint32_t bytes) {
    if (bytes > 0 && !try_option(descriptor, SOL_SOCKET, SO_RCVBUFFORCE, static_cast<int>(bytes)))
        try_option(descriptor, SOL_SOCKET, SO_RCVBUF, static_cast<int>(bytes));
}

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Socket::Socket(std::uint32_t bind_ipv4, std::uint32_t receive_buffer_bytes, bool offload)
    : asked_buffer_bytes_(receive_buffer_bytes) {
    descriptor_ = ::socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (descriptor_ < 0) fail("socket");
    try {
        // Not larger: a larger buffer lets a sender overrun its own host's queue, which drops silently.
        if (!try_option(descriptor_, SOL_SOCKET, SO_SNDBUFFORCE, kSendBufferBytes))
            try_option(descriptor_, SOL_SOCKET, SO_SNDBUF, kSendBufferBytes);
        ask_receive_buffer(descriptor_, receive_buffer_bytes);
        int actual = 0;
        socklen_t size = sizeof actual;
        if (::getsockopt(descriptor_, SOL_SOCKET, SO_RCVBUF, &actual, &size) != 0) fail("SO_RCVBUF");
        receive_buffer_bytes_ = static_cast<std::uint32_t>(actual);
        if (offload) {
            coalesces_ = try_option(descriptor_, SOL_UDP, UDP_GRO, 1);
            segments_ = try_option(descriptor_, SOL_UDP, UDP_SEGMENT, 0);
        }
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(bind_ipv4);
        if (::bind(descriptor_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fail("bind");
        socklen_t length = sizeof address;
        if (::getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &length) != 0)
            fail("getsockname");
        port_ = ntohs(address.sin_port);
    } catch (...) {
        ::close(descriptor_);
        throw;
    }
}

void Socket::mark(int dscp) {
    if (!try_option(descriptor_, IPPROTO_IP, IP_TOS, dscp << 2)) fail("IP_TOS");
}

void Socket::join(const MulticastGroup& group) {
    leave();
    aim(descriptor_, group);
    group_descriptor_ = open_member(group, port_);
    group_address_ = {group.ipv4, group.port};
    ask_receive_buffer(group_descriptor_, asked_buffer_bytes_);
    if (coalesces_) try_option(group_descriptor_, SOL_UDP, UDP_GRO, 1);
}

void Socket::leave() {
    if (group_descriptor_ >= 0) ::close(std::exchange(group_descriptor_, -1));
}

void Socket::close() {
    leave();
    if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

std::size_t Socket::receive_batch(int descriptor, std::size_t most) {
    std::array<mmsghdr, kMostMessages> messages{};
    std::array<iovec, kMostMessages> vectors;
    std::array<sockaddr_in, kMostMessages> names;
    alignas(cmsghdr) std::array<std::array<char, kControlBytes>, kMostMessages> controls;
    for (std::size_t m = 0; m < most; ++m) {
        vectors[m] = {buffers_[m].data(), kBufferBytes};
        messages[m].msg_hdr.msg_name = &names[m];
        messages[m].msg_hdr.msg_namelen = sizeof names[m];
        messages[m].msg_hdr.msg_iov = &vectors[m];
        messages[m].msg_hdr.msg_iovlen = 1;
        if (coalesces_) {
            messages[m].msg_hdr.msg_control = controls[m].data();
            messages[m].msg_hdr.msg_controllen = kControlBytes;
        }
    }
    ++counters_.receive_calls;
    const int got =
        ::recvmmsg(descriptor, messages.data(), static_cast<unsigned>(most), MSG_DONTWAIT, nullptr);
    if (got < 0 && (errno == EBADF || errno == ENOTSOCK)) {
        // Another thread has closed the descriptor. Its number may be another file's by now, which must not
        // be closed here.
        (descriptor == descriptor_ ? descriptor_ : group_descriptor_) = -1;
        fail("recvmmsg");
    }
    if (got > 0) longest_ = 1;
    for (int m = 0; m < got; ++m) {
        lengths_[m] = messages[m].msg_len;
        longest_ = std::max(longest_, lengths_[m]);
        segment_bytes_[m] = 0;
        sources_[m] = {ntohl(names[m].sin_addr.s_addr), ntohs(names[m].sin_port)};
        msghdr& header = messages[m].msg_hdr;
        for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c))
            if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO) {
                int segment = 0;
                std::memcpy(&segment, CMSG_DATA(c), sizeof segment);
                segment_bytes_[m] = static_cast<std::size_t>(std::max(segment, 0));
                counters_.coalesced_receives += segment_bytes_[m] < lengths_[m];
            }
    }
    return got > 0 ? static_cast<std::size_t>(got) : 0;
}

// How many of the first packets can travel as segments of one message: they go to one peer, and all but the
// last have the same size.
std::size_t Socket::group(std::span<const Outgoing> packets) const {
    if (!segments_) return 1;
    const std::size_t size = datagram_bytes(packets[0]);
    std::size_t n = 1, total = size;
    while (n < packets.size() && n < kMaxSegments && packets[n].to == packets[0].to) {
        const std::size_t next = datagram_bytes(packets[n]);
        if (next > size || total + next > kMaxDatagramBytes) break;
        ++n;
        total += next;
        if (next < size) break;
    }
    return n;
}

std::size_t Socket::send(std::span<const Outgoing> packets, std::span<const Address> addresses) {
    std::array<wire::HeaderBytes, kBatchPackets> heads;
    std::array<iovec, 2 * kBatchPackets> vectors;
    std::array<sockaddr_in, kBatchPackets> names;
    std::array<mmsghdr, kBatchPackets> messages;
    std::array<std::size_t, kBatchPackets> ends;  // the first packet after message m
    alignas(cmsghdr) std::array<std::array<char, CMSG_SPACE(sizeof(std::uint16_t))>, kBatchPackets> controls;

    std::size_t count = 0;
    for (std::size_t at = 0; at < packets.size(); ++count) {
        const std::size_t n = group(packets.subspan(at));
        mmsghdr& message = messages[count] = {};
        const Destination& destination = packets[at].to;
        const Address to = destination.is_everybody() ? group_address() : addresses[destination.rank()];
        names[count] = {};
        names[count].sin_family = AF_INET;
        names[count].sin_port = htons(to.port);
        names[count].sin_addr.s_addr = htonl(to.ipv4);
        message.msg_hdr.msg_name = &names[count];
        message.msg_hdr.msg_namelen = sizeof(sockaddr_in);
        message.msg_hdr.msg_iov = &vectors[2 * at];
        message.msg_hdr.msg_iovlen = 2 * n;
        for (std::size_t k = at; k < at + n; ++k) {
            heads[k] = wire::pack(packets[k].header);
            vectors[2 * k] = {heads[k].data(), heads[k].size()};
            vectors[2 * k + 1] = {const_cast<std::byte*>(packets[k].payload.data()),
                                  packets[k].payload.size()};
        }
        if (n > 1) {
            message.msg_hdr.msg_control = controls[count].data();
            message.msg_hdr.msg_controllen = controls[count].size();
            cmsghdr* control = CMSG_FIRSTHDR(&message.msg_hdr);
            control->cmsg_level = SOL_UDP;
            control->cmsg_type = UDP_SEGMENT;
            control->cmsg_len = CMSG_LEN(sizeof(std::uint16_t));
            const auto segment = static_cast<std::uint16_t>(datagram_bytes(packets[at]));
            std::memcpy(CMSG_DATA(control), &segment, sizeof segment);
            ++counters_.segmented_sends;
        }
        at += n;
        ends[count] = at;
    }

    for (std::size_t sent = 0; sent < count;) {
        ++counters_.send_calls;
        const int n =
            ::sendmmsg(descriptor_, &messages[sent], static_cast<unsigned>(count - sent), MSG_DONTWAIT);
        if (n > 0) {
            sent += static_cast<std::size_t>(n);
            continue;
        }
        if (errno == EINTR) continue;
        const std::size_t done = sent == 0 ? 0 : ends[sent - 1];
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) {
            ++counters_.blocked_sends;
            return done;
        }
        if ((errno == EIO || errno == EINVAL || errno == EMSGSIZE) && segments_ && ends[sent] - done > 1) {
            segments_ = false;  // the path cannot segment after all: the caller sends these again, one by one
            return done;
        }
        // No route, filtered or too large: counts as lost on the way.
        counters_.failed_sends += ends[sent] - done;
        ++sent;
    }
    return packets.size();
}

}  // namespace tailcut
