// The destinations that something is to be sent to, in turns, and those that the pace holds back until a
// given time.
#pragma once

#include <deque>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "protocol/sending/destination.hpp"

namespace tailcut {

class ReadyQueue {
public:
    ReadyQueue(Rank self, Rank ranks) : self_(self), ranks_(ranks), entries_(ranks + std::size_t{1}) {}

    bool empty() const { return queue_.empty(); }
    Destination front() const { return queue_.front(); }
    void push(Destination to) {
        if ((!to.is_everybody() && to.rank() == self_) || std::exchange(entry(to).ready, true)) return;
        queue_.push_back(to);
    }
    // Starts at the next rank, so that at any moment the ranks send to different receivers.
    void push_all(bool with_everybody) {
        for (std::size_t step = 1; step < ranks_; ++step) push(static_cast<Rank>((self_ + step) % ranks_));
        if (with_everybody) push(Destination::everybody());
    }
    void pass() {  // the turn goes to the next one
        const Destination to = queue_.front();
        queue_.pop_front();
        queue_.push_back(to);
    }
    void pop() {  // there is nothing for it any more
        entry(queue_.front()).ready = false;
        queue_.pop_front();
    }

    void wake(Destination to, Time at) {
        if (at < entry(to).wake_at) wakes_.push({entry(to).wake_at = at, to});
    }
    Time next_wake() const { return wakes_.empty() ? kNever : wakes_.top().first; }
    void advance(Time now) {
        for (; !wakes_.empty() && wakes_.top().first <= now; wakes_.pop()) {
            const auto [at, to] = wakes_.top();
            if (entry(to).wake_at != at) continue;
            entry(to).wake_at = kNever;
            push(to);
        }
    }

private:
    struct Entry {
        bool ready = false;
        Time wake_at = kNever;
    };
    Entry& entry(Destination to) { return entries_[to.place(ranks_)]; }

    const Rank self_, ranks_;
    std::vector<Entry> entries_;  // by rank, then that of everybody
    std::deque<Destination> queue_;
    // Soonest first. An entry is void if its destination has another wake_at.
    using Wake = std::pair<Time, Destination>;
    std::priority_queue<Wake, std::vector<Wake>, std::greater<>> wakes_;
};

}  // namespace tailcut
