// Membership in one IPv4 multicast group on one interface, as system calls on descriptors. Knows nothing of packets.
#pragma once

#include <cstdint>

namespace tailcut {

struct MulticastGroup {
    std::uint32_t ipv4 = 0;  // host order, as all addresses here
    std::uint16_t port = 0;
    std::uint32_t interface_ipv4 = 0;  // by which it is received and sent, and by no other
    int ttl = 1;                       // 1: no router forwards it
    bool loop = true;                  // members on this host receive what this socket sends
};

// Lets a socket send to the group. Throws std::system_error.
void aim(int descriptor, const MulticastGroup& group);

// A non-blocking socket that receives what is sent to the group, but for what `own_port` of the interface's address
// sent. Several on one host may be members: each gets a copy. Throws std::system_error, EADDRINUSE if somebody else
// has the port.
int open_member(const MulticastGroup& group, std::uint16_t own_port);

}  // namespace tailcut
