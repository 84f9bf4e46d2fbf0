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

// How much of a mean's runs a destination has been sent. The cursor rests at the end of the last run, which
// may still grow.
struct RunCursor {
    std::uint32_t run = 0, granule = 0;
};

// The payload points into the bucket, into the op's memory or into `keeper`. It is valid until the endpoint
// is next handed a datagram, an op or the time.
struct Outgoing {
    Destination to;
    wire::Header header;
    std::span<const std::byte> payload;
    Parcel parcel;                       // what the packet carries, to make it again if it is lost
    bool again = false;                  // it was lost before and is sent again
    bool late = false;                   // it comes too late for its op (rule 9)
    RunCursor rewind;                    // where the destination's cursor stood, for Op::retract
    std::shared_ptr<const void> keeper;  // keeps encoded bytes alive whatever the op does next
};

}  // namespace tailcut
