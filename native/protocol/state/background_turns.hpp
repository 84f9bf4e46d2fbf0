// When STATE may be sent although there is something else to send: one packet in fifty, or every 20 ms. So it
// takes at most a fiftieth of the packets of a busy rank, and still ends if a peer never stops.
#pragma once

#include "base/types.hpp"

namespace tailcut {

class BackgroundTurns {
public:
    void note_other() { ++others_; }
    void taken(Time now) { others_ = 0, taken_at_ = now; }
    bool due(Time now) const { return others_ >= kOthers || now >= due_at(); }
    Time due_at() const { return taken_at_ + kInterval; }

private:
    static constexpr int kOthers = 50;
    static constexpr Duration kInterval = 20 * kMillisecond;

    int others_ = 0;  // packets since the last one of STATE
    Time taken_at_ = -kInterval;
};

}  // namespace tailcut
