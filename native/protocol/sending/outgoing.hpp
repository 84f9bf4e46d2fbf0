// A packet on its way out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "protocol/sending/destination.hpp"
#include "protocol/sending/parcel.hpp"
#include "wire/header.hpp"

namespace tailcut {

// How far a destination has been sent the runs of a mean. Rests on the end of the last run, which may still grow.
struct RunCursor {
    std::uint32_t run = 0, granule = 0;
};

// The payload points into the bucket, into the op's memory or into `keeper`: it is valid until the endpoint is handed
// anything, a datagram, an op or the time.
struct Outgoing {
    Destination to;
    wire::Header header;
    std::span<const std::byte> payload;
    Parcel parcel;                       // what it is, to make it again if it is lost
    bool again = false;                  // it was lost before
    RunCursor rewind;                    // where the destination's cursor stood, for Op::retract
    std::shared_ptr<const void> keeper;  // keeps encoded bytes alive, whatever the op does next
};

}  // namespace tailcut
