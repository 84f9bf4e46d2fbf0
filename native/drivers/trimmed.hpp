// Receives what an ordinary UDP socket never sees: datagrams that a switch has cut without correcting their lengths.
// The kernel drops those, as their IP header promises more bytes than came, but an AF_PACKET socket sees them before;
// its filter picks exactly them, so that nothing is received twice. Needs CAP_NET_RAW. Non-blocking.
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

    // For datagrams to this UDP port. Throws std::system_error, EPERM if that is not permitted.
    void open(std::uint16_t port);
    void close();
    int descriptor() const { return descriptor_; }  // -1: not open, and receive() finds nothing

    // Hands the UDP payloads that are left, and where they came from, to `visit`, at most `most` of them. Returns how
    // many.
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
    std::span<const std::byte> receive_one();  // without data: there is none

    int descriptor_ = -1;
    Address source_;                      // of the latest
    std::array<std::byte, 9216> buffer_;  // a jumbo frame
};

}  // namespace tailcut
