// Receives datagrams that a switch has cut without correcting their lengths, which an ordinary UDP socket
// never sees. The kernel drops them because their IP header promises more bytes than came. An AF_PACKET
// socket sees them before that; its filter accepts only them, so nothing is received twice. Needs
// CAP_NET_RAW. It does not block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "drivers/socket.hpp"

namespace tailcut {

class TrimmedSocket {
public:
    TrimmedSocket() = default;
    ~TrimmedSocket() { close(); }
    TrimmedSocket(const TrimmedSocket&) = delete;
    TrimmedSocket& operator=(const TrimmedSocket&) = delete;

    // For datagrams to this UDP port. Throws std::system_error, with EPERM if that is not permitted.
    void open(std::uint16_t port);
    void close();
    int descriptor() const { return descriptor_; }  // -1: not open, and receive() finds nothing

    // Hands at most `most` trimmed UDP payloads and their source addresses to `visit`. Returns how many.
    template <typename Visit>
    std::size_t receive(std::size_t most, Visit visit) {
        std::size_t count = 0;
        for (; count < most; ++count) {
            const auto datagram = receive_one();
            if (!datagram.data()) break;
            visit(datagram, source_);
        }
        return count;
    }

private:
    std::span<const std::byte> receive_one();  // its data() is null if there is none

    int descriptor_ = -1;
    Address source_;                      // of the latest datagram
    std::array<std::byte, 9216> buffer_;  // the size of a jumbo frame
};

}  // namespace tailcut
