// Coverage-guided fuzzing of the endpoint. The input is a script of what a group, a clock and a hostile
// network may do to it. All ranks are real endpoints, so that forged datagrams meet real states. Every rank
// is held to the same invariants, and a broken one aborts.
//
//   fuzz_endpoint -max_len=4096 NEW_CORPUS tests/native/corpus      explore
//   fuzz_endpoint FILE                                              replay one input
#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "codec/stripe.hpp"
#include "protocol/endpoint.hpp"
#include "protocol/grid/column_values.hpp"

// Defined only with a sanitizer that counts allocations; the bound on memory outside of the pool needs it.
extern "C" __attribute__((weak)) std::size_t __sanitizer_get_current_allocated_bytes();

namespace {

using namespace tailcut;

constexpr std::uint64_t kTag = 0x7461696C6375;
constexpr std::size_t kGuard = 16;  // floats on each side of a bucket
constexpr std::size_t kWireDatagrams = 64;
constexpr std::ptrdiff_t kMostFetches = 8;  // under way at a rank
constexpr std::uint64_t kMostBlobBytes = 4000;
constexpr std::array<std::uint32_t, 12> kLengths = {0, 1, 63, 64, 65, 127, 128, 129, 300, 640, 1000, 2000};

#define MUST(condition)                                                                  \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                \
        }                                                                                \
    } while (false)

// Reads the input as a sequence of small numbers, followed by zeros forever.
class Script {
public:
    explicit Script(std::span<const std::uint8_t> input) : left_(input) {}

    bool over() const { return left_.empty(); }
    template <typename T>
    T take() {
        T value{};
        const std::size_t n = std::min(sizeof(T), left_.size());
        if (n > 0) std::memcpy(&value, left_.data(), n);
        left_ = left_.subspan(n);
        return value;
    }
    std::uint32_t below(std::uint32_t limit) { return take<std::uint8_t>() % limit; }

private:
    std::span<const std::uint8_t> left_;
};

// A bucket between guard zones. Once its report is out, the bucket belongs to the caller and no byte may
// change any more.
class Bucket {
public:
    Bucket(std::uint32_t length, float value, Time deadline)
        : deadline(deadline), floats_(length + 2 * kGuard) {
        std::fill(floats_.begin(), floats_.end(), kPattern);
        for (std::size_t k = 0; k < length; ++k) values()[k] = value + static_cast<float>(k);
    }

    std::span<float> values() { return {floats_.data() + kGuard, floats_.size() - 2 * kGuard}; }
    std::size_t bytes() const { return floats_.size() * sizeof(float); }
    void report() {
        MUST(!reported);
        reported = true;
        final_ = floats_;
    }
    void check() const {
        const auto intact = [](float value) { return value == kPattern; };
        MUST(std::all_of(floats_.begin(), floats_.begin() + kGuard, intact));
        MUST(std::all_of(floats_.end() - kGuard, floats_.end(), intact));
        MUST(!reported || std::memcmp(final_.data(), floats_.data(), bytes()) == 0);
    }

    const Time deadline;
    bool reported = false;

private:
    static constexpr float kPattern = -1234.5f;
    std::vector<float> floats_, final_;
};

struct Datagram {
    Rank destination;
    std::vector<std::byte> bytes;
};

// One rank: an endpoint, its buckets, and the invariants that must hold whatever is done to it.
class Host {
public:
    Host(const Settings& settings, const std::vector<PeerSettings>& peers, bool column)
        : endpoint(settings, peers,
                   column ? make_column_values(column_ops_, settings.codec, false)
                          : make_values(settings.codec, false)),
          settings_(settings),
          peers_(peers),
          column_(column),
          stamps_(peers.size() + 1) {}

    void submit(Time now, std::uint32_t length, const Terms& terms);
    void receive(Time now, std::span<const std::byte> bytes);
    void advance(Time now);
    // At most `most` packets; the last `retracted` of them are retracted.
    std::vector<Datagram> transmit(Time now, std::size_t most, std::size_t retracted);
    void take_reports();
    // One of what the local rank does with blobs: a small one is offered, withdrawn, fetched, or not fetched
    // after all.
    void use_state(std::uint32_t deed, Rank other, std::uint64_t id);
    void check_memory() const;
    void check_buckets() const {
        for (const auto& [ticket, bucket] : buckets_) bucket.check();
    }
    std::size_t submitted_bytes() const { return submitted_bytes_; }

    Endpoint endpoint;

private:
    std::uint64_t dealt_with() const;
    void check_outgoing(const Outgoing& out);
    void check_data(const wire::Header& header, const Outgoing& out) const;
    void note_entry(Ticket newest, std::uint32_t length);

    const Settings settings_;
    const std::vector<PeerSettings> peers_;
    const bool column_;     // of a grid: a contribution stands for several ranks
    ColumnOps column_ops_;  // destroyed before the endpoint, whose memory it holds
    std::map<Ticket, Bucket> buckets_;
    std::size_t submitted_bytes_ = 0;
    // By peer, then of multicast: the last stamp sent.
    std::vector<std::uint32_t> stamps_;
    std::uint64_t kept_packets_ = 0;  // transmitted and not retracted
    // Ops whose shard may be outside of the pool, and its floats.
    std::vector<std::pair<Ticket, std::size_t>> in_flight_;
    std::map<Ticket, bool> fetches_;  // whether they have ended
    std::size_t in_flight_floats_ = 0, in_flight_peak_ = 0;
};

void Host::submit(Time now, std::uint32_t length, const Terms& terms) {
    if (column_) length = length / kGranule * kGranule;
    const Ticket ticket = buckets_.size();
    const auto value = static_cast<float>(ticket * 8 + settings_.shape.self);
    Bucket& bucket = buckets_.try_emplace(ticket, length, value, now + terms.bounds.deadline).first->second;
    submitted_bytes_ += 2 * bucket.bytes() + 4096;  // including its final copy and the tables of its op
    const Seq seq = endpoint.ops().next_seq();
    if (column_) {
        RowSum& sum = column_ops_[seq].sum = {};
        for (std::uint32_t g = 0; g < length / kGranule; ++g)
            sum.counts.push_back(static_cast<float>(g / 2 % 3));
        sum.gaussian.assign(codec::Blocks(length).count(), seq % 2 == 0);
    }
    endpoint.submit(now, ticket, bucket.values(), terms);
    take_reports();
    if (endpoint.ops().next_seq() == seq + 1) note_entry(ticket, length);  // it was entered, not refused
}

// Counts memory outside of the pool: ops in flight, and ops of the window that a peer in them still awaits.
void Host::note_entry(Ticket newest, std::uint32_t length) {
    const Epoch& epoch = endpoint.epochs().at(endpoint.ops().next_seq() - 1);
    const Layout layout{length, settings_.shape.ranks, epoch.owners()};
    std::size_t floats = owned_floats(settings_.codec, layout) + 16;
    // Means that are not complete, or contributions that were overwritten before they were delivered.
    floats += length + 16 * (codec::Blocks(length).count() + 2 * layout.ranks);
    if (settings_.codec == wire::Codec::kPlanes)  // plus what is encoded of each contribution
        floats += layout.ranks * (layout.shard_stride() / kGranule * codec::kSlotFloats + 16);
    // In a column also the mean, as it was coded or in pool memory.
    if (column_ && settings_.codec == wire::Codec::kPlanes)
        floats += std::max<std::size_t>(length, length / kGranule * codec::kSlotFloats) + 16;
    in_flight_.emplace_back(newest, floats);
    in_flight_floats_ += in_flight_.back().second;
    in_flight_peak_ = std::max(in_flight_peak_, in_flight_floats_);  // before the older ones are removed
    const std::size_t recent = std::max<std::size_t>(3, settings_.window_ops + 1u);
    for (std::size_t k = 0; k + recent < in_flight_.size();) {
        if (buckets_.at(in_flight_[k].first).reported) {
            in_flight_floats_ -= in_flight_[k].second;
            in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(k));
        } else {
            ++k;
        }
    }
}

void Host::check_memory() const {
    MUST(endpoint.pool_used_bytes() <= settings_.pool_bytes);
    // Used and kept memory: the pool, the ops in flight at their peak, and the history of empty buckets,
    // which stays.
    const std::size_t empty = std::size_t{settings_.window_ops} * 16;
    MUST(endpoint.memory_bytes() <= settings_.pool_bytes + (in_flight_peak_ + empty) * sizeof(float));
}

std::uint64_t Host::dealt_with() const {
    const Counters& counters = endpoint.counters();
    // Late contributions are rejected; late means are not.
    std::uint64_t sum = counters.traffic.late_packets;
    sum -= counters.rejected[static_cast<std::size_t>(wire::Reject::kLate)];
    for (const std::uint64_t rejected : counters.rejected) sum += rejected;
    return sum;
}

void Host::use_state(std::uint32_t deed, Rank other, std::uint64_t id) {
    StateChannel& state = *endpoint.state();
    const auto under_way = [](const auto& fetch) { return !fetch.second; };
    if (deed == 0)
        state.offer(id, std::make_shared<const std::vector<std::byte>>(id * 500, std::byte{7}));
    else if (deed == 1)
        state.withdraw(id);
    else if (deed == 2 && std::count_if(fetches_.begin(), fetches_.end(), under_way) < kMostFetches)
        state.fetch(fetches_.emplace(fetches_.size(), false).first->first, other, id, kMostBlobBytes);
    else if (deed == 3 && !fetches_.empty()) {
        const Ticket ticket = id % fetches_.size();
        state.cancel(ticket);
        fetches_[ticket] = true;
    }
}

void Host::receive(Time now, std::span<const std::byte> bytes) {
    // An exact copy on the heap, so that a read beyond the datagram is detected.
    const std::vector<std::byte> datagram(bytes.begin(), bytes.end());
    const std::uint64_t received = endpoint.counters().traffic.received_packets, before = dealt_with();
    endpoint.receive(now, datagram);
    MUST(endpoint.counters().traffic.received_packets == received + 1);
    MUST(dealt_with() - before <= 1);  // it is used, or counted for exactly one reason
    take_reports();
}

void Host::advance(Time now) {
    endpoint.advance(now);
    take_reports();
    MUST(endpoint.next_timer() > now);
    for (const auto& [ticket, bucket] : buckets_) MUST(bucket.reported || bucket.deadline > now);
}

void Host::take_reports() {
    for (const OpReport& report : endpoint.reports()) {
        const auto found = buckets_.find(report.ticket);
        MUST(found != buckets_.end());
        found->second.report();
        column_ops_.erase(report.seq);
        MUST(report.ended_at >= report.entered_at);
    }
    endpoint.reports().clear();
    for (const Fetched& fetched : endpoint.state()->fetched()) {
        MUST(fetched.status != FetchStatus::kPending && fetched.bytes.size() <= kMostBlobBytes);
        MUST(fetched.bytes.empty() || fetched.status == FetchStatus::kComplete);
        MUST(!std::exchange(fetches_.at(fetched.ticket), true));
    }
    endpoint.state()->fetched().clear();
    const auto waiting = [](const auto& entry) { return !entry.second.reported; };
    MUST(endpoint.in_flight() ==
         static_cast<std::size_t>(std::count_if(buckets_.begin(), buckets_.end(), waiting)));
}

std::vector<Datagram> Host::transmit(Time now, std::size_t most, std::size_t retracted) {
    std::vector<Outgoing> batch;
    std::vector<std::vector<std::byte>> sent;
    Outgoing out;
    while (batch.size() < most && endpoint.transmit(now, out)) {
        check_outgoing(out);
        const wire::HeaderBytes head = wire::pack(out.header);
        sent.emplace_back(head.begin(), head.end());
        sent.back().insert(sent.back().end(), out.payload.begin(), out.payload.end());
        batch.push_back(out);
    }
    for (; retracted > 0 && !batch.empty(); --retracted) {
        endpoint.retract(now, batch.back());
        batch.pop_back();
        sent.pop_back();
    }
    kept_packets_ += batch.size();
    MUST(endpoint.counters().traffic.sent_packets == kept_packets_);
    std::vector<Datagram> datagrams;
    for (std::size_t k = 0; k < batch.size(); ++k)
        if (!batch[k].to.is_everybody())
            datagrams.push_back({batch[k].to.rank(), std::move(sent[k])});
        else
            for (const Rank member : settings_.multicast.members) datagrams.push_back({member, sent[k]});
    return datagrams;
}

void Host::check_outgoing(const Outgoing& out) {
    const wire::Parsed parsed = wire::parse(wire::pack(out.header));
    const wire::Header& header = parsed.header;
    MUST(parsed.ok);
    MUST(header.group_tag == kTag && header.source == settings_.shape.self);
    const bool multicast = out.to.is_everybody();
    const std::size_t place = out.to.place(settings_.shape.ranks);
    MUST(place < settings_.shape.ranks + std::size_t{!settings_.multicast.members.empty()});
    MUST(place != settings_.shape.self);
    MUST(!multicast || (header.type == wire::Type::kData && header.stage() == wire::Stage::kGather));
    MUST(header.type != wire::Type::kData || header.multicast() == multicast);
    MUST(stamps_[place] == 0 || !after(stamps_[place], header.stamp_us));
    MUST(header.stamp_us != 0);
    stamps_[place] = header.stamp_us;
    if (header.type == wire::Type::kState) {
        MUST(out.payload.size() == wire::stated_payload_bytes(header));
        MUST(out.payload.size() <= peers_[out.to.rank()].limits.payload_bytes);
        return;
    }
    MUST(out.payload.size() == wire::stated_payload_bytes(header));
    if (header.type != wire::Type::kData) return;
    check_data(header, out);
}

void Host::check_data(const wire::Header& header, const Outgoing& out) const {
    const Shape& shape = settings_.shape;
    const bool gather = header.stage() == wire::Stage::kGather;
    MUST(header.shard < shape.ranks);
    const Plan plan(shape, header.seq, bucket_of(header), endpoint.epochs().at(header.seq));
    MUST(header.epoch == plan.epoch.number);
    MUST(plan.layout.owned(header.shard));
    MUST(plan.owner(header.shard) == (gather ? shape.self : out.to.rank()));
    MUST(gather || header.entry_us != wire::kNotEntered);
    MUST(header.count > 0 || header.empty());
    const std::uint32_t length = plan.layout.length(header.shard);
    MUST(header.first % kGranule == 0 && header.first + std::uint64_t{header.count} <= length);
    MUST(header.count % kGranule == 0 || header.first + header.count == length);
    MUST(header.empty() || header.codec == settings_.codec);
    MUST(out.payload.size() <= peers_[out.to.place(shape.ranks) % shape.ranks].limits.payload_bytes);
    MUST(header.seq < endpoint.ops().next_seq() ||
         header.seq - endpoint.ops().next_seq() < settings_.window_ops);
}

class Group {
public:
    explicit Group(Script& script);
    void run();

private:
    void step();
    void submit();
    void heed();
    void install(Host& host);
    void forge();
    void flood();
    void raw();
    void pass_on();
    void pass_on_damaged();
    void transmit();
    void exchange();
    void wait();
    void leave();
    void use_state();
    void check();

    wire::Header any_header(Rank destination);
    wire::Header any_state(wire::Header header);
    Datagram from_wire();
    Host& any_host() { return *hosts_[script_.below(ranks_)]; }
    void put(std::vector<Datagram> datagrams);

    Script& script_;
    const std::size_t allocated_before_ = allocated();
    static std::size_t allocated() {
        return __sanitizer_get_current_allocated_bytes ? __sanitizer_get_current_allocated_bytes() : 0;
    }
    Rank ranks_;
    Seq first_seq_ = 0;
    std::uint64_t seed_;
    std::size_t pool_bytes_;
    wire::Codec codec_;
    Terms terms_;
    Time now_ = 1'000'000'000;
    std::vector<std::unique_ptr<Host>> hosts_;
    std::deque<Datagram> wire_;  // sent and not delivered yet; the script decides their fate
};

Group::Group(Script& script) : script_(script) {
    ranks_ = static_cast<Rank>(1 + script.below(5));
    const std::uint32_t group = script.take<std::uint8_t>();
    seed_ = group % 16;
    codec_ = group < 128 ? wire::Codec::kRaw : wire::Codec::kPlanes;
    pool_bytes_ = script.below(33) * std::size_t{1024};
    const std::uint32_t limits = script.take<std::uint8_t>();
    const std::uint32_t times = script.take<std::uint8_t>();
    terms_.scatter.planes = static_cast<int>(1 + group / 8 % 16);
    terms_.gather.planes = static_cast<int>(1 + group / 16 % 16);
    terms_.gather.whole = group % 2 == 0;
    terms_.skip_above = group % 3 == 0 ? 0.05f : 0.0f;
    const Duration deadline = (4 + times / 16) * kMillisecond;
    terms_.bounds = {(1 + times % 4) * kMillisecond,     (4 + times / 4 % 4) * kMillisecond,
                     (1 + times / 4 % 8) * kMillisecond, times % 8 * kMillisecond,
                     times / 2 % 8 * kMillisecond,       deadline};
    terms_.incast = times % 3;
    Settings settings;
    settings.group_tag = kTag;
    settings.window_ops = 1 + limits % 5;
    settings.pool_bytes = pool_bytes_;
    settings.window_bytes = 2048 * (1 + limits / 8 % 8);
    settings.codec = codec_;
    settings.terms = terms_;
    settings.resend = limits % 4 != 3;
    const bool column = limits % 8 == 5;
    settings.carry = !column;  // as grids have it, whatever keys packets have
    if (limits >= 192) first_seq_ = 0xFFFFFFFF - script.below(8);  // rule 12: the end of the sequence numbers
    settings.first_seq = first_seq_;
    const codec::PacketLimits packets{(1 + limits / 64 % 3) * 256, limits % 2 ? 16u : 0};
    const std::vector<PeerSettings> peers(ranks_,
                                          {settings.window_bytes, pool_bytes_, packets, group % 3 == 0});
    for (Rank rank = 0; rank < ranks_; ++rank) {
        settings.shape = {rank, ranks_, seed_};
        settings.multicast = {{}, peers[rank]};
        // Rank 0 may hear no multicast.
        for (Rank other = times / 64 % 2; times / 32 % 2 && other < ranks_; ++other)
            if (other != rank) settings.multicast.members.push_back(other);
        hosts_.push_back(std::make_unique<Host>(settings, peers, column));
    }
}

void Group::run() {
    while (!script_.over()) {
        step();
        check();
    }
    // Whatever happened, every op has been reported once the last deadline has passed.
    now_ += terms_.bounds.deadline;
    for (auto& host : hosts_) {
        host->advance(now_);
        MUST(host->endpoint.in_flight() == 0);
        put(host->transmit(now_, SIZE_MAX, 0));  // must terminate
    }
    check();
}

void Group::step() {
    switch (script_.below(16)) {
        case 0:
            return raw();
        case 1:
        case 2:
        case 3:
            return forge();
        case 4:
            return flood();
        case 5:
        case 6:
            return pass_on();
        case 7:
            return pass_on_damaged();
        case 8:
        case 9:
            return submit();
        case 10:
            return wait();
        case 11:
            return transmit();
        case 12:
        case 13:
            return exchange();
        case 14:
            return script_.below(2) == 0 ? heed() : use_state();
        case 15:
            return leave();
    }
}

// What the local rank tells its endpoint between ops.
void Group::heed() {
    Host& host = any_host();
    const Seq next = host.endpoint.ops().next_seq();
    switch (script_.below(4)) {
        case 0:
            return host.endpoint.resynced();
        case 2:
            return install(host);
        case 1:
            return host.endpoint.skipped(next - std::min<Seq>(next, 3), next);
        default:
            return host.endpoint.forget(script_.below(3), 64 * script_.below(8), 64 * script_.below(8));
    }
}

// Ranks may be told of different ones: nothing that others do may break one.
void Group::install(Host& host) {
    const Seq next = host.endpoint.ops().next_seq();
    Epoch epoch;
    epoch.number = static_cast<std::uint16_t>(host.endpoint.epochs().latest().number + 1);
    epoch.first_seq = next - std::min<Seq>(next, 2) + script_.below(5);
    std::vector<std::uint16_t> weights;
    for (Rank rank = 0; rank < ranks_; ++rank)
        weights.push_back(static_cast<std::uint16_t>(script_.below(3)));
    weights[script_.below(ranks_)] = 1;
    for (const std::uint16_t weight : weights) epoch.members.push_back(weight > 0 || script_.below(2) > 0);
    epoch.weights.emplace(weights);
    host.endpoint.install(now_, std::move(epoch));
    host.take_reports();
}

void Group::submit() {
    Host& host = any_host();
    Terms terms = terms_;
    const std::uint32_t bucket = script_.below(3 * kLengths.size());
    terms.key = bucket % 3;
    host.submit(now_, kLengths[bucket / 3], terms);
}

void Group::raw() {
    Host& host = any_host();
    std::vector<std::byte> bytes(script_.below(80));
    for (std::byte& byte : bytes) byte = script_.take<std::byte>();
    host.receive(now_, bytes);
}

// A header that is plausible in most fields, so that the input passes the first checks.
wire::Header Group::any_header(Rank destination) {
    wire::Header header;
    const std::uint32_t kind = script_.take<std::uint8_t>();
    header.type = static_cast<wire::Type>(kind % 8 == 0 ? 2 : kind % 8 == 1 ? 3 : 1);
    header.flags = kind / 8 % 16;
    header.group_tag = kTag;
    header.source = static_cast<Rank>(script_.below(ranks_ + 1u));
    if (kind % 32 == 2) return any_state(header);
    header.seq = hosts_[destination]->endpoint.ops().next_seq() + script_.below(12) - 6;
    const std::uint32_t length = script_.below(kLengths.size() + 1);
    header.bucket_len = length < kLengths.size() ? kLengths[length] : script_.take<std::uint32_t>();
    header.key = header.seq % 3;
    const Epoch& epoch = hosts_[destination]->endpoint.epochs().at(header.seq);
    header.epoch = epoch.number;
    const Shape shape{destination, ranks_, seed_};
    const Rank owner = header.flags & wire::kGatherStage ? header.source : destination;
    header.shard = kind >= 128 ? static_cast<Rank>(script_.below(8))
                               : Plan(shape, header.seq, bucket_of(header), epoch).shard_of(owner % ranks_);
    const std::uint32_t run = script_.take<std::uint8_t>();
    header.first = run % 16 * (kGranule / 2);
    header.echo_us = script_.take<std::uint16_t>() * 64u;
    header.count = static_cast<std::uint16_t>(run / 16 * kGranule + (run % 3 == 0 ? script_.below(64) : 0));
    const std::uint32_t ahead = script_.below(64);
    header.stamp_us = static_cast<std::uint32_t>(now_ / kMicrosecond) + ahead;
    header.latest = static_cast<std::uint16_t>(header.echo_us / 64 % 32);
    header.number = static_cast<std::uint16_t>(header.latest + ahead % 3);
    if (ahead % 4 == 3) header.flags |= wire::kMulticast;
    header.entry_us = kind >= 192 ? wire::kNotEntered : script_.take<std::uint16_t>();
    if (header.type != wire::Type::kData || codec_ == wire::Codec::kRaw) return header;
    header.codec = codec_;
    header.planes = static_cast<std::uint8_t>(1 + script_.below(16));
    header.scale = std::bit_cast<float>(script_.take<std::uint32_t>());
    header.gain_one = script_.take<std::uint16_t>();
    header.gain_full = script_.take<std::uint16_t>();
    return header;
}

wire::Header Group::any_state(wire::Header header) {
    const std::uint32_t kind = script_.take<std::uint8_t>();
    header.type = wire::Type::kState;
    header.flags = kind % 8 < 6 ? kind % 4 : kind;
    header.stamp_us = static_cast<std::uint32_t>(now_ / kMicrosecond);
    header.seq = script_.below(8);
    header.blob_id = script_.below(10);
    header.edition = static_cast<std::uint16_t>(script_.below(4));
    const bool wild = kind >= 192;
    header.run_bytes = wild ? script_.take<std::uint32_t>() : script_.take<std::uint8_t>() * 4;
    header.blob_first = wild ? script_.take<std::uint64_t>() : script_.below(8) * header.run_bytes;
    if (!header.answer() || header.absent()) return header;
    header.blob_bytes = wild ? script_.take<std::uint64_t>() : header.blob_id * 500;
    return header;
}

void Group::forge() {
    const auto destination = static_cast<Rank>(script_.below(ranks_));
    const wire::Header header = any_header(destination);
    const wire::HeaderBytes head = wire::pack(header);
    std::vector<std::byte> bytes(head.begin(), head.end());
    const std::uint32_t tail = script_.take<std::uint8_t>();
    const std::size_t stated = std::min<std::size_t>(wire::stated_payload_bytes(header), 1 << 16);
    bytes.resize(bytes.size() + (tail < 160   ? stated
                                 : tail < 200 ? stated * (tail - 160) / 40
                                              : tail * 4),
                 std::byte{0x3F});
    hosts_[destination]->receive(now_, bytes);
}

// The same header again and again with another length, or for another op: memory must not grow with them.
void Group::flood() {
    const auto destination = static_cast<Rank>(script_.below(ranks_));
    wire::Header header = any_header(destination);
    const bool lengths = script_.below(2) == 0;
    header.flags |= wire::kEmpty;
    header.first = header.count = 0;
    for (std::uint32_t k = 0; k < 1024; ++k) {
        hosts_[destination]->receive(now_, wire::pack(header));
        ++(lengths ? header.bucket_len : header.seq);
    }
}

Datagram Group::from_wire() {
    const std::size_t at = script_.below(kWireDatagrams) % wire_.size();
    Datagram datagram = std::move(wire_[at]);
    wire_.erase(wire_.begin() + static_cast<std::ptrdiff_t>(at));
    return datagram;
}

void Group::pass_on() {
    if (wire_.empty()) return;
    const Datagram datagram = from_wire();
    for (std::uint32_t copies = 1 + script_.below(4) / 3; copies > 0; --copies)
        hosts_[datagram.destination]->receive(now_, datagram.bytes);
}

void Group::pass_on_damaged() {
    if (wire_.empty()) return;
    Datagram datagram = from_wire();
    for (std::uint32_t flips = script_.below(4); flips > 0 && !datagram.bytes.empty(); --flips)
        datagram.bytes[script_.below(64) % datagram.bytes.size()] ^= script_.take<std::byte>();
    const std::uint32_t size = script_.take<std::uint8_t>();
    if (size < 192)
        datagram.bytes.resize(datagram.bytes.size() * (size + 1) / 128, std::byte{1});  // cut or extended
    hosts_[datagram.destination]->receive(now_, datagram.bytes);
}

void Group::put(std::vector<Datagram> datagrams) {
    for (Datagram& datagram : datagrams) wire_.push_back(std::move(datagram));
    while (wire_.size() > kWireDatagrams) wire_.pop_front();  // the oldest are lost
}

void Group::transmit() {
    Host& host = any_host();
    const std::uint32_t most = script_.below(16), retracted = script_.below(16);
    put(host.transmit(now_, most, retracted));
}

// A good moment: everybody sends, and everything arrives in order. It is bounded, as real time would bound
// it.
void Group::exchange() {
    for (std::uint32_t rounds = 1 + script_.below(8); rounds > 0; --rounds) {
        for (auto& host : hosts_)
            for (Datagram& datagram : host->transmit(now_, 256, 0))
                hosts_[datagram.destination]->receive(now_, datagram.bytes);
        now_ += 20 * kMicrosecond;
    }
}

void Group::wait() {
    const std::uint32_t how = script_.take<std::uint8_t>();
    if (how >= 128) {  // exactly to the next timer, where comparisons switch
        Time next = now_ + terms_.bounds.deadline;
        for (const auto& host : hosts_) next = std::min(next, host->endpoint.next_timer());
        now_ = std::max(now_, next - (how == 255));
    } else {
        now_ += how * 50 * kMicrosecond;
    }
    for (auto& host : hosts_) host->advance(now_);
}

void Group::use_state() {
    Host& host = any_host();
    const std::uint32_t deed = script_.below(8);
    if (deed >= 6) return host.endpoint.set_away(deed == 6);
    if (deed >= 4) return host.endpoint.resynced();
    const auto other = static_cast<Rank>(script_.below(ranks_ + 1u));
    host.use_state(deed, other, script_.below(10));
    host.take_reports();
}

void Group::leave() {
    Host& host = any_host();
    const std::uint32_t how = script_.below(4);
    if (how % 2 == 0) return how == 0 ? host.endpoint.say_goodbye() : host.endpoint.leave();
    host.endpoint.abort(now_);
    host.take_reports();
    MUST(host.endpoint.in_flight() == 0);
}

void Group::check() {
    std::size_t accounted = 1 << 19;  // slack: tables of small ops, the wire, this harness
    for (const auto& host : hosts_) {
        host->check_memory();
        host->check_buckets();
        accounted += host->endpoint.memory_bytes() + host->submitted_bytes();
        accounted += (kMostFetches + 10) * (kMostBlobBytes + 1000);  // with the blobs that it offers
    }
    MUST(allocated() <= allocated_before_ + accounted);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Script script({data, size});
    Group(script).run();
    return 0;
}
