// One rank of a flat group. It does no I/O: it is told the time and handed datagrams, and gives back
// datagrams, its next timer and the reports of ended ops. It checks everything that comes from the network
// (rule 11) and passes it to the part that it concerns.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "protocol/carry/carry.hpp"
#include "protocol/core.hpp"
#include "protocol/ops/attendance.hpp"
#include "protocol/ops/epochs.hpp"
#include "protocol/ops/memory.hpp"
#include "protocol/ops/ops.hpp"
#include "protocol/reports/accounts.hpp"
#include "protocol/roster.hpp"
#include "protocol/sending/links.hpp"
#include "protocol/sending/outbox.hpp"
#include "protocol/sending/peer_pools.hpp"
#include "protocol/settings.hpp"
#include "protocol/state/state_channel.hpp"
#include "protocol/values/values.hpp"

namespace tailcut {

class Endpoint final : public Core {
public:
    // `peers` is indexed by rank; the own entry is not used.
    Endpoint(const Settings& settings, const std::vector<PeerSettings>& peers)
        : Endpoint(settings, peers, make_values(settings.codec, settings.elided)) {}
    Endpoint(const Settings& settings, const std::vector<PeerSettings>& peers, std::unique_ptr<Values> values,
             CloseListener* listener = nullptr);

    void submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms) override;
    void resynced() override { ops_.resynced(); }
    void skip_to(Seq seq) override;
    void rejoined() override { ops_.rejoined(); }
    void skipped(Seq from, Seq until) override { carry_.skip(from, until); }
    void forget(std::uint32_t key, std::uint64_t first, std::uint64_t last) override {
        carry_.forget_means(key, first, last);
    }
    void install(Time now, Epoch epoch) override;
    void set_away(bool away) override;
    void say_goodbye() override;
    void abort(Time now) override;
    void leave() override;
    bool drained() const override;

    void receive(Time now, std::span<const std::byte> datagram) override;
    std::optional<Rank> claimed_source(std::span<const std::byte> datagram) const override;
    bool transmit(Time now, Outgoing& out) override { return outbox_.transmit(now, out); }
    void retract(Time now, const Outgoing& out) override { outbox_.retract(now, out); }
    Time next_timer() const override;
    void advance(Time now) override;

    std::vector<OpReport>& reports() override { return ops_.reports(); }
    std::vector<OpReport> take_open() override;
    std::vector<OpReport> take_served() override { return ops_.take_served(); }
    Counters counters() const override { return accounts_.counters; }
    std::size_t pool_used_bytes() const override { return memory_.pool_used_bytes(); }
    std::size_t memory_bytes() const override { return memory_.total_bytes(); }
    Duration rtt(Rank rank) const override { return links_[rank].path.rtt(); }
    StateChannel* state() override { return &state_; }
    bool contributing() const override { return ops_.contributing(); }
    std::size_t in_flight() const override { return ops_.in_flight(); }
    Seq next_seq() const override { return ops_.next_seq(); }
    Seq group_seq() const override { return roster_.group_seq(ops_.next_seq()); }
    std::uint16_t heard_epoch() const override { return epochs_.heard(); }

    // For callers that drive several endpoints: see Ops.
    const Ops& ops() const { return ops_; }
    const Epochs& epochs() const { return epochs_; }
    void expect(const Terms& terms) { ops_.expect(terms); }
    void close(Time now, Seq seq);
    void reduce(Time now, Seq seq, std::uint32_t bucket_len, bool non_finite,
                const std::function<void(Reduction&)>& put);
    std::uint64_t group_tag() const { return settings_.group_tag; }
    Rank ranks() const { return settings_.shape.ranks; }

private:
    void refuse(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms, Status status);
    void refuse_epoch(const wire::Header& header, const Epoch& ours);
    void on_feedback(Time now, const wire::Header& header, std::span<const std::byte> report);
    void settle(Time now, const wire::Header& header, std::span<const std::byte> report);
    void on_goodbye(Time now, const wire::Header& header, std::span<const std::byte> report);
    void on_data(Time now, const wire::Header& header, std::span<const std::byte> payload);
    void note_entered(Time now, Rank rank, Seq entered);
    void spread_news();

    const Settings settings_;
    Memory memory_;  // declared before the ops because their blocks return to it
    Epochs epochs_;
    Roster roster_;
    Attendance attendance_;
    Links links_;
    Accounts accounts_;
    PeerPools pools_;
    const std::unique_ptr<Values> values_;
    Carry carry_;
    Scratch scratch_;
    const OpContext context_;
    Ops ops_;
    StateChannel state_;
    Outbox outbox_;
};

}  // namespace tailcut
