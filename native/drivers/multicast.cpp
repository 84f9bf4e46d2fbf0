#include "drivers/multicast.hpp"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <system_error>

namespace tailcut {
namespace {

template <typename Value>
void set(int descriptor, int level, int name, const Value& value, const char* what) {
    if (::setsockopt(descriptor, level, name, &value, sizeof value) != 0)
        throw std::system_error(errno, std::generic_category(), what);
}

// Datagrams of this interface come back to a member if other sockets of this host are members too. The kernel
// drops them before they take room in the buffer. The filter of a UDP socket begins at the UDP header.
void drop_own(int descriptor, std::uint32_t own_ipv4, std::uint16_t own_port) {
    constexpr std::uint32_t kIpSource = 12, kUdpSource = 0;
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_H | BPF_ABS, kUdpSource),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, own_port, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(SKF_NET_OFF) + kIpSource),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, own_ipv4, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, 0),
        BPF_STMT(BPF_RET | BPF_K, 0xFFFFFFFF),
    };
    const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
    set(descriptor, SOL_SOCKET, SO_ATTACH_FILTER, program, "SO_ATTACH_FILTER");
}

ip_mreqn membership(const MulticastGroup& group) {
    return {{htonl(group.ipv4)}, {htonl(group.interface_ipv4)}, 0};
}

}  // namespace

void aim(int descriptor, const MulticastGroup& group) {
    set(descriptor, IPPROTO_IP, IP_MULTICAST_IF, membership(group), "IP_MULTICAST_IF");
    set(descriptor, IPPROTO_IP, IP_MULTICAST_TTL, group.ttl, "IP_MULTICAST_TTL");
    set(descriptor, IPPROTO_IP, IP_MULTICAST_LOOP, static_cast<int>(group.loop), "IP_MULTICAST_LOOP");
}

int open_member(const MulticastGroup& group, std::uint16_t own_port) {
    const int descriptor = ::socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "socket");
    try {
        drop_own(descriptor, group.interface_ipv4, own_port);
        set(descriptor, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
        // Receives only what comes through the interface, whatever else this host has joined.
        set(descriptor, IPPROTO_IP, IP_MULTICAST_ALL, 0, "IP_MULTICAST_ALL");
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(group.ipv4);
        address.sin_port = htons(group.port);
        if (::bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
            throw std::system_error(errno, std::generic_category(), "bind");
        set(descriptor, IPPROTO_IP, IP_ADD_MEMBERSHIP, membership(group), "IP_ADD_MEMBERSHIP");
    } catch (...) {
        ::close(descriptor);
        throw;
    }
    return descriptor;
}

}  // namespace tailcut
