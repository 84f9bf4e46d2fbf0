// When STATE may be sent although there is something else to send: one packet in fifty, or every 20 ms. So it
// takes at most a fiftieth of the packets of a busy rank, and still ends if a peer never stops. A rank that
// rejoins is urgent: one packet in eight, or every 2 ms. It must have the state before history is gone.
#pragma once

#include "base/types.hpp"

namespace tailcut {

class BackgroundTurns {
public:
    void note_other() { ++others_; }
    void taken(Time now) { others_ = 0, taken_at_ = now; }
    bool due(Time now, bool urgent) const {
        return others_ >= (urgent ? kUrgentOthers : kOthers) || now >= due_at(urgent);
    }
    Time due_at(bool urgent) const { return taken_at_ + (urgent ? kUrgentInterval : kInterval); }

private:
    static constexpr int kOthers = 50, kUrgentOthers = 8;
    static constexpr Duration kInterval = 20 * kMillisecond, kUrgentInterval = 2 * kMillisecond;

    int others_ = 0;  // packets since the last one of STATE
    Time taken_at_ = -kInterval;
};

}  // namespace tailcut
