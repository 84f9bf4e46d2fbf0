#include "drivers/trimmed.hpp"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace tailcut {
namespace {

// Offsets in an IPv4 packet, which is what a cooked packet socket delivers.
constexpr std::uint32_t kTotalLength = 2, kFragment = 6, kProtocol = 9, kIpSource = 12, kUdpDestination = 2;
constexpr std::size_t kUdpBytes = 8;

// Accepts unfragmented UDP packets to the port and to this host that are shorter than their IP header says.
std::array<sock_filter, 14> filter_for(std::uint16_t port) {
    constexpr std::uint8_t kDrop = 13;  // the last instruction; jumps count from the next one
    const auto unless = [](std::uint16_t test, std::uint32_t value, std::uint8_t at) {
        return sock_filter BPF_JUMP(static_cast<std::uint16_t>(BPF_JMP | test), value, 0,
                                    static_cast<std::uint8_t>(kDrop - at - 1));
    };
    const auto load = [](int mode, std::uint32_t from) {
        return sock_filter BPF_STMT(static_cast<std::uint16_t>(mode), from);
    };
    return {
        load(BPF_LD | BPF_B | BPF_ABS, static_cast<std::uint32_t>(SKF_AD_OFF + SKF_AD_PKTTYPE)),
        unless(BPF_JEQ | BPF_K, PACKET_HOST, 1),
        load(BPF_LD | BPF_B | BPF_ABS, kProtocol),
        unless(BPF_JEQ | BPF_K, IPPROTO_UDP, 3),
        load(BPF_LDX | BPF_B | BPF_MSH, 0),  // X: bytes of the IP header
        load(BPF_LD | BPF_H | BPF_IND, kUdpDestination),
        unless(BPF_JEQ | BPF_K, port, 6),
        load(BPF_LD | BPF_H | BPF_ABS, kFragment),
        // Any bit other than "don't fragment" marks a fragment. JSET jumps if a bit is set, so the targets
        // are swapped.
        sock_filter BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, 0x3FFF, kDrop - 9, 0),
        load(BPF_LDX | BPF_W | BPF_LEN, 0),
        load(BPF_LD | BPF_H | BPF_ABS, kTotalLength),
        sock_filter BPF_JUMP(BPF_JMP | BPF_JGT | BPF_X, 0, 0, 1),
        load(BPF_RET | BPF_K, 0xFFFF),
        load(BPF_RET | BPF_K, 0),
    };
}

[[noreturn]] void fail(const char* what, int descriptor) {
    const int error = errno;
    if (descriptor >= 0) ::close(descriptor);
    throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

void TrimmedSocket::open(std::uint16_t port) {
    // Protocol 0: nothing is received before the filter is attached.
    const int descriptor = ::socket(AF_PACKET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (descriptor < 0) fail("AF_PACKET", -1);
    auto filter = filter_for(port);
    const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
    if (::setsockopt(descriptor, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) != 0)
        fail("SO_ATTACH_FILTER", descriptor);
    const int bytes = 4 << 20;
    if (::setsockopt(descriptor, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes) != 0)
        (void)::setsockopt(descriptor, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    sockaddr_ll any{};
    any.sll_family = AF_PACKET;
    any.sll_protocol = htons(ETH_P_IP);
    if (::bind(descriptor, reinterpret_cast<sockaddr*>(&any), sizeof any) != 0) fail("bind", descriptor);
    close();
    descriptor_ = descriptor;
}

void TrimmedSocket::close() {
    if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

std::span<const std::byte> TrimmedSocket::receive_one() {
    if (descriptor_ < 0) return {};
    const ssize_t got = ::recv(descriptor_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (got <= 0) return {};
    const std::size_t ip_bytes = (std::to_integer<std::size_t>(buffer_[0]) & 15) * 4;
    const std::size_t headers = ip_bytes + kUdpBytes;
    const auto bytes = static_cast<std::size_t>(got);
    std::uint32_t ipv4;
    std::uint16_t port;
    std::memcpy(&ipv4, &buffer_[kIpSource], sizeof ipv4);
    std::memcpy(&port, &buffer_[ip_bytes], sizeof port);  // the UDP header begins with it
    source_ = {ntohl(ipv4), ntohs(port)};
    // A packet that was cut before its payload is an empty datagram.
    return {buffer_.data() + std::min(headers, bytes), bytes - std::min(headers, bytes)};
}

}  // namespace tailcut
