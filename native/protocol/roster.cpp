#include "protocol/roster.hpp"

#include <algorithm>
#include <functional>
#include <utility>

namespace tailcut {
namespace {

// A rank is silent after this many ops in a row have ended without a word from it.
constexpr int kSilentOps = 2;

}  // namespace

Roster::Roster(const Shape& shape, Seq first_seq) : self_(shape.self), members_(shape.ranks) {
    for (Member& member : members_) member.entered = first_seq;
}

bool Roster::hears_nobody() const {
    if (silent_count_ == 0) return false;
    for (Rank rank = 0; rank < ranks(); ++rank)
        if (rank != self_ && present(rank)) return false;
    return true;
}

std::uint8_t Roster::least_incast() const {
    if (limiting_count_ == 0) return 0;
    std::uint8_t least = 0;
    for (const Member& member : members_)
        if (member.incast != 0 && !member.silent())
            least = least == 0 ? member.incast : std::min(least, member.incast);
    return least;
}

Seq Roster::group_seq(Seq own) const {
    std::vector<Seq> entered;
    for (Rank rank = 0; rank < ranks(); ++rank)
        if (rank != self_ && !silent(rank)) entered.push_back(members_[rank].entered);
    if (entered.empty()) return own;
    const std::size_t majority = (entered.size() + 1) / 2;
    std::nth_element(entered.begin(), entered.begin() + static_cast<std::ptrdiff_t>(majority - 1),
                     entered.end(), std::greater<>());
    return entered[majority - 1];
}

Seq Roster::behind_ops(Seq own) const {
    const Seq group = group_seq(own);
    return group > own ? group - own : 0;
}

void Roster::hear(Time now, Time sent, Rank rank, std::uint8_t incast) {
    Member& member = members_[rank];
    member.heard_at = now;
    heard_at_ = std::max(heard_at_, sent);
    member.quiet_ops = 0;
    set(rank, &Member::quiet, false);
    limiting_count_ += incast != 0;
    limiting_count_ -= member.incast != 0;
    member.incast = incast;
}

void Roster::hear(const LrScale& told, Seq by) {
    if (told.near(by) && told.newer_than(lr_scale_)) lr_scale_ = told;
}

bool Roster::note_entered(Rank rank, Seq entered) {
    if (entered <= members_[rank].entered) return false;
    members_[rank].entered = entered;
    members_[rank].away = false;
    return true;
}

bool Roster::note_away(Rank rank, bool away) { return std::exchange(members_[rank].away, away) != away; }

void Roster::set(Rank rank, bool Member::* why, bool is) {
    Member& member = members_[rank];
    silent_count_ -= member.silent();
    member.*why = is;
    silent_count_ += member.silent();
}

void Roster::note_leaving(Rank rank, Seq from) {
    members_[rank].leaving = true;
    members_[rank].leaves_at = from;
}

void Roster::note_partial(Time entered_at) {
    for (Rank rank = 0; rank < ranks(); ++rank) {
        Member& member = members_[rank];
        if (rank == self_ || member.heard_at >= entered_at || ++member.quiet_ops != kSilentOps) continue;
        set(rank, &Member::quiet, true);
    }
}

}  // namespace tailcut
