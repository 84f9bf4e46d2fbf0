// The UDP lane under the thread and address sanitizers: several ranks in one process over 127.0.0.1. Several
// threads submit to the lanes, wait for reports, read stats, and close and destroy the lanes. Every op must
// be reported once, and what is complete must be the exact mean. No assertion depends on how fast the machine
// is: only kPatience ends a wait.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "drivers/udp.hpp"

namespace {

using namespace tailcut;

constexpr std::uint32_t kLoopback = 0x7F000001;
constexpr Duration kSecond = 1000 * kMillisecond;
constexpr Duration kPatience = 15 * kSecond;
constexpr Bounds kLong{10 * kSecond, 10 * kSecond, 12 * kSecond, 12 * kSecond, 12 * kSecond, 12 * kSecond};
constexpr Terms kGenerous{.bounds = kLong, .column_bounds = kLong};

struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void must(bool holds, const std::string& what) {
    if (!holds) throw Broken(what);
}

struct Variant {
    Rank ranks = 3;
    bool offload = true;
    std::uint32_t receive_buffer_bytes = 1 << 20;
    wire::Codec codec = wire::Codec::kRaw;
    Rank rows = 1;

    std::string name() const {
        return std::to_string(ranks) + " ranks, offload " + (offload ? "on" : "off") + ", buffer " +
               std::to_string(receive_buffer_bytes / 1024) + " KiB" +
               (codec == wire::Codec::kPlanes ? ", planes" : "") +
               (rows > 1 ? ", " + std::to_string(rows) + " rows" : "");
    }
};

// The lanes of all ranks, each with its own settings as if it were a process of its own.
class Lanes {
public:
    // A grid adds up rows in another order than the check does, so it gets a tolerance.
    explicit Lanes(const Variant& variant)
        : error_(variant.codec == wire::Codec::kPlanes ? 1e-3f
                 : variant.rows > 1                    ? 1e-6f
                                                       : 0.0f) {
        std::vector<Address> addresses;
        std::vector<std::vector<Address>> sources;
        std::uint32_t buffer = UINT32_MAX;
        for (Rank rank = 0; rank < variant.ranks; ++rank) {
            lanes_.push_back(
                std::make_unique<UdpLane>(kLoopback, variant.receive_buffer_bytes, variant.offload));
            addresses.push_back({kLoopback, lanes_.back()->port()});
            sources.push_back({addresses.back()});
            buffer = std::min(buffer, lanes_.back()->receive_buffer_bytes());
        }
        Settings settings;
        settings.group_tag = 42;
        settings.pool_bytes = 1 << 22;
        settings.window_bytes = buffer / 10 * 7 / std::max(1, variant.ranks - 1);
        settings.codec = variant.codec;
        settings.rows = variant.rows;
        settings.terms = kGenerous;
        const codec::PacketLimits limits{buffer > 1 << 18 ? 8704u : 1024u, 0};
        const std::vector<PeerSettings> peers(variant.ranks,
                                              {settings.window_bytes, settings.pool_bytes, limits});
        for (Rank rank = 0; rank < variant.ranks; ++rank) {
            settings.shape = {rank, variant.ranks, 7};
            lanes_[rank]->start(settings, peers, addresses, sources);
        }
    }

    UdpLane& operator[](Rank rank) { return *lanes_[rank]; }
    float error() const { return error_; }  // the largest error allowed in a coordinate
    Rank ranks() const { return static_cast<Rank>(lanes_.size()); }
    void destroy(Rank rank) { lanes_[rank].reset(); }

    // All ranks leave together, as at the end of a program.
    void close() {
        for (auto& lane : lanes_) lane->close(5 * kSecond);
        for (auto& lane : lanes_) must(lane->join(kPatience), "an engine did not end");
    }

private:
    const float error_;
    std::vector<std::unique_ptr<UdpLane>> lanes_;
};

// Depends on the rank and the coordinate, not on the op: ops of one length may be paired in any order.
float value(Rank rank, std::size_t at) {
    return static_cast<float>(rank + 1) / static_cast<float>(at % 1000 + 3);
}

std::vector<float> make_bucket(Rank rank, std::size_t length) {
    std::vector<float> bucket(length);
    for (std::size_t at = 0; at < length; ++at) bucket[at] = value(rank, at);
    return bucket;
}

float mean(Rank ranks, std::size_t at) {
    float sum = value(0, at);
    for (Rank rank = 1; rank < ranks; ++rank) sum += value(rank, at);
    return sum / static_cast<float>(ranks);
}

void must_be_mean(const std::vector<float>& bucket, const Lanes& lanes) {
    for (std::size_t at = 0; at < bucket.size(); ++at)
        must(std::fabs(bucket[at] - mean(lanes.ranks(), at)) <= lanes.error(),
             "coordinate " + std::to_string(at) + " is not the mean");
}

OpReport wait_for(UdpLane& lane, Ticket ticket) {
    OpReport report;
    must(lane.wait(ticket, kPatience, report), "an op was not reported");
    must(report.ticket == ticket, "another op's report");
    return report;
}

// Runs one body per rank, each on its own thread, and passes on the first failure.
void on_each(Rank ranks, const std::function<void(Rank)>& body) {
    std::vector<std::string> failures(ranks);
    std::vector<std::thread> threads;
    for (Rank rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&, rank] {
            try {
                body(rank);
            } catch (const Broken& broken) {
                failures[rank] = broken.what();
            }
        });
    for (auto& thread : threads) thread.join();
    for (const std::string& failure : failures) must(failure.empty(), failure);
}

// Calls stats() all the time until it is destroyed.
class Watcher {
public:
    explicit Watcher(Lanes& lanes)
        : thread_([this, &lanes] {
              while (!over_.load())
                  for (Rank rank = 0; rank < lanes.ranks(); ++rank) {
                      const LaneStats stats = lanes[rank].stats();
                      if (stats.pool_used_bytes > 1 << 22) overrun_ = true;
                      std::this_thread::yield();
                  }
          }) {}
    ~Watcher() { stop(); }
    void stop() {
        over_ = true;
        if (thread_.joinable()) thread_.join();
    }
    bool overrun() const { return overrun_; }

private:
    std::atomic<bool> over_ = false, overrun_ = false;
    std::thread thread_;
};

// ---- cases ------------------------------------------------------------------------------------------------

void run_ops(Lanes& lanes, const std::vector<std::size_t>& lengths, Rank rank) {
    std::vector<std::vector<float>> buckets;
    std::vector<Ticket> tickets;
    for (const std::size_t length : lengths) buckets.push_back(make_bucket(rank, length));
    for (auto& bucket : buckets) tickets.push_back(lanes[rank].submit(bucket, kGenerous));
    for (std::size_t op = 0; op < tickets.size(); ++op) {
        must(wait_for(lanes[rank], tickets[op]).status == Status::kComplete,
             "an op on loopback was not complete");
        must_be_mean(buckets[op], lanes);
    }
}

void results_are_exact(const Variant& variant) {
    Lanes lanes(variant);
    Watcher watcher(lanes);
    for (int round = 0; round < 4; ++round)
        on_each(lanes.ranks(), [&](Rank rank) { run_ops(lanes, {0, 1, 63, 65, 20'000, 127, 50'000}, rank); });
    watcher.stop();
    must(!watcher.overrun(), "more in the pool than it holds");
    lanes.close();
}

// Two threads submit to each lane while two others wait; all ops are alike, so their order does not matter.
void many_threads_share_a_lane(const Variant& variant) {
    constexpr std::size_t kOps = 24, kLength = 3'000;
    Lanes lanes(variant);
    Watcher watcher(lanes);
    on_each(lanes.ranks(), [&](Rank rank) {
        on_each(2, [&](Rank) {
            std::vector<std::vector<float>> buckets(kOps, make_bucket(rank, kLength));
            std::vector<Ticket> tickets;
            for (auto& bucket : buckets) tickets.push_back(lanes[rank].submit(bucket, kGenerous));
            on_each(2, [&](Rank waiter) {
                for (std::size_t op = waiter; op < kOps; op += 2) {
                    must(wait_for(lanes[rank], tickets[op]).status == Status::kComplete, "not complete");
                    must_be_mean(buckets[op], lanes);
                }
            });
        });
    });
    watcher.stop();
    lanes.close();
}

// close() with ops in flight: all of them still end, and what is complete is exact.
void closing_lets_ops_end(const Variant& variant) {
    Lanes lanes(variant);
    on_each(lanes.ranks(), [&](Rank rank) {
        std::vector<std::vector<float>> buckets(6, make_bucket(rank, 30'000));
        std::vector<Ticket> tickets;
        for (auto& bucket : buckets) tickets.push_back(lanes[rank].submit(bucket, kGenerous));
        lanes[rank].close(5 * kSecond);
        for (std::size_t op = 0; op < tickets.size(); ++op)
            if (wait_for(lanes[rank], tickets[op]).status == Status::kComplete)
                must_be_mean(buckets[op], lanes);
        must(lanes[rank].join(kPatience), "an engine did not end");
    });
}

// A lane is destroyed without a word: the others' ops end at their deadline, and the process goes on.
void destruction_is_a_death(const Variant& variant) {
    constexpr Duration kEnd = 300 * kMillisecond;
    const Terms terms{.bounds = {100 * kMillisecond, 100 * kMillisecond, kEnd, kEnd, kEnd, kEnd}};
    Lanes lanes(variant);
    std::vector<std::vector<float>> buckets;
    for (Rank rank = 0; rank < lanes.ranks(); ++rank) buckets.push_back(make_bucket(rank, 100'000));
    std::vector<Ticket> tickets;
    for (Rank rank = 0; rank < lanes.ranks(); ++rank)
        tickets.push_back(lanes[rank].submit(buckets[rank], terms));
    lanes.destroy(0);
    for (Rank rank = 1; rank < lanes.ranks(); ++rank) {
        const Status status = wait_for(lanes[rank], tickets[rank]).status;
        must(status == Status::kComplete || status == Status::kPartial, "a death is more than a partial op");
    }
}

// close(0) while a caller waits: it gets its report at once, and so does whoever submits afterwards.
void abort_wakes_the_waiter(const Variant& variant) {
    Lanes lanes(variant);
    std::vector<float> bucket = make_bucket(0, 10'000);
    const Ticket ticket = lanes[0].submit(bucket, kGenerous);  // the others never enter
    on_each(2, [&](Rank thread) {
        if (thread == 0)
            must(wait_for(lanes[0], ticket).status == Status::kClosed, "the op survived its lane");
        else
            lanes[0].close(0);
    });
    must(lanes[0].join(kPatience), "an engine did not end");
    const Ticket refused = lanes[0].submit(bucket, kGenerous);
    must(wait_for(lanes[0], refused).status == Status::kClosed, "a closed lane took an op");
}

// The program has closed a socket under its engine, and the descriptor's number now belongs to another file:
// the waiter is told why, and so is whoever submits afterwards.
void failure_wakes_the_waiter(const Variant& variant) {
    Lanes lanes(variant);
    const int number = lanes[0].descriptor();
    std::vector<float> bucket = make_bucket(0, 10'000);
    const Ticket ticket = lanes[0].submit(bucket, kGenerous);  // the others never enter
    on_each(2, [&](Rank thread) {
        if (thread == 1) {
            const int file = ::open("/dev/null", O_RDONLY);
            must(file >= 0 && ::dup2(file, number) == number && ::close(file) == 0, "no other file");
        } else {
            must(wait_for(lanes[0], ticket).status == Status::kFailed, "the op survived its engine");
        }
    });
    must(!lanes[0].failure().empty(), "a failure without a cause");
    const Ticket refused = lanes[0].submit(bucket, kGenerous);
    must(wait_for(lanes[0], refused).status == Status::kFailed, "a failed lane took an op");
    lanes.destroy(0);
    must(::close(number) == 0, "a file was closed that was not the lane's");
}

// One rank leaves with a goodbye: the others go on without it at once, not only at their deadlines.
void the_others_go_on(const Variant& variant) {
    Lanes lanes(variant);
    on_each(lanes.ranks(), [&](Rank rank) { run_ops(lanes, {5'000}, rank); });
    lanes[0].close(5 * kSecond);
    on_each(lanes.ranks(), [&](Rank rank) {
        for (int op = 0; op < 8 && rank > 0; ++op) {
            std::vector<float> bucket = make_bucket(rank, 5'000);
            const OpReport report = wait_for(lanes[rank], lanes[rank].submit(bucket, kGenerous));
            must(report.status == Status::kComplete, "waited for a rank that had said goodbye");
        }
    });
    lanes.close();
}

struct Case {
    const char* name;
    void (*run)(const Variant&);
};
constexpr Case kCases[] = {
    {"results are exact", results_are_exact},
    {"many threads share a lane", many_threads_share_a_lane},
    {"closing lets ops end", closing_lets_ops_end},
    {"destruction is a death", destruction_is_a_death},
    {"abort wakes the waiter", abort_wakes_the_waiter},
    {"failure wakes the waiter", failure_wakes_the_waiter},
    {"the others go on", the_others_go_on},
};

}  // namespace

int main() {
    const Variant variants[] = {{2, true, 1 << 20},
                                {3, false, 1 << 20},
                                {4, true, 1 << 16},
                                {3, true, 1 << 20, wire::Codec::kPlanes},
                                {4, true, 1 << 20, wire::Codec::kRaw, 2}};
    int passed = 0, failed = 0;
    for (const Variant& variant : variants)
        for (const Case& test : kCases) {
            try {
                test.run(variant);
                ++passed;
            } catch (const Broken& broken) {
                ++failed;
                std::printf("%s (%s): %s\n", test.name, variant.name().c_str(), broken.what());
            }
        }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
