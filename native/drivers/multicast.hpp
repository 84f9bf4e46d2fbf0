// Membership in one IPv4 multicast group on one interface, as system calls on descriptors. It knows nothing
// of packets.
#pragma once

#include <cstdint>

namespace tailcut {

struct MulticastGroup {
    std::uint32_t ipv4 = 0;  // in host order, as all addresses here
    std::uint16_t port = 0;
    std::uint32_t interface_ipv4 = 0;  // the only interface by which it is received and sent
    int ttl = 1;                       // 1: no router forwards it
    bool loop = true;                  // members on this host receive what this socket sends
};

// Lets a socket send to the group. Throws std::system_error.
void aim(int descriptor, const MulticastGroup& group);

// A non-blocking socket that receives what is sent to the group, except what `own_port` at the interface's
// address sent. Several sockets of one host may be members; each gets a copy. Throws std::system_error, with
// EADDRINUSE if another socket has the port.
int open_member(const MulticastGroup& group, std::uint16_t own_port);

}  // namespace tailcut
