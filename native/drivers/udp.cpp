#include "drivers/udp.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "protocol/reports/record.hpp"

namespace tailcut {
namespace {

Time clock_now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Receiving and sending take turns, so that neither a flood nor a large bucket keeps the other side waiting.
// The rounds are small enough for what was just reduced to be still in cache when it is sent.
constexpr std::size_t kReceiveRoundBytes = 256 * 1024;
constexpr std::size_t kSendRoundBytes = 512 * 1024;
constexpr std::size_t kTrimmedRound = 256;  // packets
// With an op in flight the next packet is near, so the thread yields a few times before it sleeps. On 2 cores
// 5 rounds are as good as 50 for small ops over loopback, and leave a tenth more of the machine to four
// emulated links.
constexpr int kYieldRounds = 5;

}  // namespace

UdpLane::UdpLane(std::uint32_t bind_ipv4, std::uint32_t receive_buffer_bytes, bool offload)
    : process_(::getpid()), socket_(bind_ipv4, receive_buffer_bytes, offload) {
    wake_descriptor_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake_descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    batch_.reserve(Socket::kBatchPackets);
}

UdpLane::~UdpLane() {
    if (::getpid() != process_) {
        abandon();
        return;
    }
    close(0);
    if (engine_ && engine_->joinable()) engine_->join();
    if (wake_descriptor_ >= 0) ::close(wake_descriptor_);
}

void UdpLane::abandon() {
    // The engine thread exists only in the parent. Here the lock may be held forever, and the state may be
    // half-written.
    (void)engine_.release();
    (void)core_.release();
    (void)shared_.release();
    (void)new std::vector<Outgoing>(std::move(batch_));
    socket_.close();
    trimmed_.close();
    if (wake_descriptor_ >= 0) ::close(std::exchange(wake_descriptor_, -1));
}

void UdpLane::keep_ledger(std::shared_ptr<LedgerFile> ledger, std::unique_ptr<OpenOps> open,
                          std::vector<std::byte> head) {
    ledger_ = std::move(ledger);
    open_ = std::move(open);
    record_head_ = std::move(head);
}

void UdpLane::start(const Settings& settings, const std::vector<PeerSettings>& peers,
                    std::vector<Address> addresses, std::vector<std::vector<Address>> sources) {
    if (!settings.multicast.members.empty() && socket_.group_descriptor() < 0)
        throw std::logic_error("members, but no multicast group was joined");
    core_ = make_core(settings, peers);
    addresses_ = std::move(addresses);
    sources_ = std::move(sources);
    ranks_ = addresses_.size();
    engine_ = std::make_unique<std::thread>([this] { run(); });
}

// ---- the callers' side ------------------------------------------------------------------------------------

Ticket UdpLane::submit(std::span<float> bucket, const Terms& terms) {
    const std::lock_guard lock(shared_->mutex);
    const Ticket ticket = shared_->next_ticket++;
    if (shared_->ended || shared_->close_linger >= 0 || !engine_) {
        OpReport& report = shared_->reports[ticket];
        report.ticket = ticket;
        report.status = end_status();
        return ticket;
    }
    shared_->submissions.push_back({ticket, bucket, terms});
    if (std::exchange(shared_->asleep, false)) wake();
    return ticket;
}

void UdpLane::notify(std::function<void(Core&)> notice) {
    const std::lock_guard lock(shared_->mutex);
    shared_->notices.push_back(std::move(notice));
}

void UdpLane::install(Epoch epoch) {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->ended || !engine_) return;
    shared_->epochs.push_back(std::move(epoch));
    if (std::exchange(shared_->asleep, false)) wake();
}

void UdpLane::set_away(bool away) {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->ended || !engine_) return;
    shared_->away = away;
    if (std::exchange(shared_->asleep, false)) wake();
}

bool UdpLane::wait(Ticket ticket, Duration timeout, OpReport& report) {
    std::unique_lock lock(shared_->mutex);
    const auto there = [&] { return shared_->ended || shared_->reports.contains(ticket); };
    if (!shared_->reported.wait_for(lock, std::chrono::nanoseconds(timeout), there)) return false;
    if (const auto found = shared_->reports.find(ticket); found != shared_->reports.end()) {
        report = found->second;
    } else {  // the engine ended without a report for it
        report.ticket = ticket;
        report.status = end_status();
    }
    return true;
}

void UdpLane::drop_report(Ticket ticket) {
    const std::lock_guard lock(shared_->mutex);
    shared_->reports.erase(ticket);
}

void UdpLane::command(StateCommand command) {
    if (shared_->ended || !engine_) return;
    shared_->state_commands.push_back(std::move(command));
    if (std::exchange(shared_->asleep, false)) wake();
}

void UdpLane::offer(std::uint64_t id, Blob blob) {
    const std::lock_guard lock(shared_->mutex);
    command([id, blob = std::move(blob)](StateChannel& state) { state.offer(id, blob); });
}

void UdpLane::withdraw(std::uint64_t id) {
    const std::lock_guard lock(shared_->mutex);
    command([id](StateChannel& state) { state.withdraw(id); });
}

Ticket UdpLane::fetch(Rank server, std::uint64_t id, std::uint64_t most_bytes) {
    const std::lock_guard lock(shared_->mutex);
    const Ticket ticket = shared_->next_ticket++;
    command([=](StateChannel& state) { state.fetch(ticket, server, id, most_bytes); });
    return ticket;
}

void UdpLane::cancel(Ticket ticket) {
    const std::lock_guard lock(shared_->mutex);
    // The engine thread erases it, so that it is not published afterwards.
    command([this, ticket](StateChannel& state) {
        state.cancel(ticket);
        const std::lock_guard lock(shared_->mutex);
        shared_->fetched.erase(ticket);
    });
}

Fetched UdpLane::take_fetched(Ticket ticket, Duration timeout) {
    std::unique_lock lock(shared_->mutex);
    const auto there = [&] { return shared_->ended || shared_->fetched.contains(ticket); };
    if (!there() && !shared_->reported.wait_for(lock, std::chrono::nanoseconds(timeout), there))
        return {ticket, FetchStatus::kPending, {}};
    if (auto found = shared_->fetched.extract(ticket)) return std::move(found.mapped());
    return {ticket, FetchStatus::kClosed, {}};
}

std::map<Rank, std::uint64_t> UdpLane::take_wanted() {
    const std::lock_guard lock(shared_->mutex);
    return std::exchange(shared_->wanted, {});
}

std::string UdpLane::failure() const {
    const std::lock_guard lock(shared_->mutex);
    return shared_->failure.data();
}

// The status of an op that the engine did not report. Called under the lock.
Status UdpLane::end_status() const { return shared_->failure[0] ? Status::kFailed : Status::kClosed; }

void UdpLane::close(Duration linger) {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->ended) return;
    Duration& agreed = shared_->close_linger;
    agreed = agreed < 0 ? linger : std::min(agreed, linger);
    shared_->close_changed = true;
    shared_->asleep = false;
    wake();
}

bool UdpLane::join(Duration timeout) {
    if (!engine_) return true;
    {
        std::unique_lock lock(shared_->mutex);
        if (!shared_->reported.wait_for(lock, std::chrono::nanoseconds(timeout),
                                        [&] { return shared_->ended; }))
            return false;
    }
    const std::lock_guard lock(shared_->mutex);
    if (engine_->joinable()) {
        engine_->join();
        core_.reset();
        socket_.close();
        trimmed_.close();
        ::close(std::exchange(wake_descriptor_, -1));
    }
    return true;
}

LaneStats UdpLane::stats() const {
    const std::lock_guard lock(shared_->mutex);
    return shared_->stats;
}

Seq UdpLane::behind_ops() const {
    const std::lock_guard lock(shared_->mutex);
    const Seq own = shared_->next_seq + static_cast<Seq>(shared_->submissions.size());
    return shared_->group_seq - std::min(shared_->group_seq, own);
}

std::uint16_t UdpLane::heard_epoch() const {
    const std::lock_guard lock(shared_->mutex);
    return shared_->heard_epoch;
}

// Called under the lock, because join() closes the descriptor.
void UdpLane::wake() {
    const std::uint64_t one = 1;
    while (::write(wake_descriptor_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

// ---- the engine thread ------------------------------------------------------------------------------------

void UdpLane::run() {
    ::prctl(PR_SET_TIMERSLACK, 1000UL);  // in ns; the default of 50 us would be added to every deadline
    std::array<char, 256> failure{};
    const auto note = [&](const char* why) { std::snprintf(failure.data(), failure.size(), "%s", why); };
    try {
        serve();
    } catch (const std::bad_alloc&) {
        note("out of memory; lower pool_bytes or the buckets");
    } catch (const std::exception& error) {
        note(*error.what() ? error.what() : "an exception without a word");
    } catch (...) {
        note("an exception of an unknown type");
    }
    batch_.clear();  // before the memory that its packets point into is freed
    {
        const std::lock_guard lock(shared_->mutex);
        shared_->failure = failure;
        shared_->ended = true;
    }
    shared_->reported.notify_all();
}

void UdpLane::serve() {
    int idle_rounds = 0;
    for (;;) {
        take_commands();
        bool busy = receive(kReceiveRoundBytes);
        if (clock_now() >= core_->next_timer()) {
            // After a freeze the socket may be full: read it before concluding that nothing came.
            receive(socket_.most_waiting_bytes());
            while (receive_trimmed_packets() > 0) {
            }
            core_->advance(clock_now());
            busy = true;
        }
        if (!blocked_ || writable()) busy |= send();
        publish();
        if (closing_ && (clock_now() >= linger_until_ || (core_->in_flight() == 0 && core_->drained())))
            break;
        idle_rounds = busy ? 0 : idle_rounds + 1;
        if (idle_rounds == 0) continue;
        if (core_->in_flight() > 0 && idle_rounds <= kYieldRounds)
            ::sched_yield();
        else
            sleep();
    }
    core_->abort(clock_now());
    send();
    core_->leave();
    send();
    publish();
    const std::lock_guard lock(shared_->mutex);
    take_stats();
}

void UdpLane::take_commands() {
    std::vector<Submission> submissions;
    std::vector<std::function<void(Core&)>> notices;
    std::vector<StateCommand> state_commands;
    std::vector<Epoch> epochs;
    std::optional<bool> away;
    Duration linger;
    {
        const std::lock_guard lock(shared_->mutex);
        if (!shared_->commands()) return;
        away = std::exchange(shared_->away, {});
        epochs.swap(shared_->epochs);
        submissions.swap(shared_->submissions);
        shared_->next_seq += static_cast<Seq>(submissions.size());
        state_commands.swap(shared_->state_commands);
        linger = std::exchange(shared_->close_changed, false) ? shared_->close_linger : -1;
        notices.swap(shared_->notices);
    }
    for (const auto& notice : notices) notice(*core_);
    if (away) core_->set_away(*away);
    const Time now = clock_now();
    for (Epoch& epoch : epochs) core_->install(now, std::move(epoch));
    if (StateChannel* const state = core_->state())
        for (const StateCommand& command : state_commands) command(*state);
    for (const Submission& submission : submissions)
        core_->submit(now, submission.ticket, submission.bucket, submission.terms);
    if (linger < 0) return;
    if (!closing_) core_->say_goodbye();
    closing_ = true;
    linger_until_ = std::min(linger_until_, now + linger);
}

bool UdpLane::receive(std::size_t most_bytes) {
    std::size_t bytes = 0;
    while (bytes < most_bytes) {
        Time now = 0;  // read once the batch is there, so that it is never before a datagram came
        const bool more = socket_.receive([&](std::span<const std::byte> datagram, const Address& from) {
            if (now == 0) now = clock_now();
            bytes += datagram.size() + kDatagramOverheadBytes;
            take(now, datagram, from);
        });
        if (!more) break;
    }
    return receive_trimmed_packets() > 0 || bytes > 0;
}

// Anyone who has learned the group's tag can forge a header, but cannot as easily send from a member's
// address.
void UdpLane::take(Time now, std::span<const std::byte> datagram, const Address& from) {
    if (const auto rank = core_->claimed_source(datagram)) {
        const std::vector<Address>& known = sources_[*rank];
        if (std::find(known.begin(), known.end(), from) == known.end()) {
            ++forged_packets_;
            return;
        }
    }
    core_->receive(now, datagram);
}

std::size_t UdpLane::receive_trimmed_packets() {
    const std::size_t packets = trimmed_.receive(
        kTrimmedRound,
        [&](std::span<const std::byte> datagram, const Address& from) { take(clock_now(), datagram, from); });
    uncorrected_packets_ += packets;
    return packets;
}

// Checked before a batch is put together that would only have to be retracted.
bool UdpLane::writable() const {
    pollfd full{socket_.descriptor(), POLLOUT, 0};
    return ::poll(&full, 1, 0) > 0;
}

bool UdpLane::send() {
    bool any = false;
    std::size_t bytes = 0;
    blocked_ = false;
    while (!blocked_) {
        const Time now = clock_now();
        batch_.clear();
        Outgoing out;
        while (batch_.size() < Socket::kBatchPackets && bytes < kSendRoundBytes &&
               core_->transmit(now, out)) {
            batch_.push_back(out);
            bytes += out.payload.size();
        }
        if (batch_.empty()) break;
        record();
        const bool segmented = socket_.segments();
        const std::size_t sent = socket_.send(batch_, addresses_);
        for (std::size_t k = batch_.size(); k > sent; --k) core_->retract(now, batch_[k - 1]);
        any |= sent > 0;
        blocked_ = sent < batch_.size() && segmented == socket_.segments();
    }
    batch_.clear();  // returns encoded bytes to the endpoint's memory
    return any;
}

// What is on its way to others is on record before it leaves.
void UdpLane::record() {
    if (!ledger_) return;
    for (const OpReport& report : core_->take_served())
        ledger_->append(LedgerKind::kServed, record_head_, record_of(report));
    if (!open_) return;
    for (; recorded_ < core_->reports().size(); ++recorded_)
        if (const OpReport& report = core_->reports()[recorded_]; !report.granules.empty())
            open_->put(LedgerKind::kOp, record_head_, record_of(report));
    for (const OpReport& report : core_->take_open())
        open_->put(LedgerKind::kOpen, record_head_, record_of(report));
}

void UdpLane::publish() {
    record();
    StateChannel* const state = core_->state();
    const bool fetched = state && !state->fetched().empty(), wanted = state && !state->wanted().empty();
    if (core_->reports().empty() && !fetched && !wanted) return;
    {
        const std::lock_guard lock(shared_->mutex);
        take_progress();
        if (fetched)
            for (Fetched& blob : state->fetched()) {
                const Ticket ticket = blob.ticket;
                shared_->fetched.emplace(ticket, std::move(blob));
            }
        if (wanted)
            for (const auto& [rank, id] : std::exchange(state->wanted(), {})) shared_->wanted[rank] = id;
        for (OpReport& report : core_->reports()) {
            const Ticket ticket = report.ticket;
            shared_->reports.emplace(ticket, std::move(report));
        }
    }
    core_->reports().clear();
    recorded_ = 0;
    if (fetched) state->fetched().clear();
    shared_->reported.notify_all();
}

// Called under the lock.
void UdpLane::take_stats() {
    LaneStats& stats = shared_->stats;
    stats.protocol = core_->counters();
    stats.protocol.rejected[static_cast<std::size_t>(wire::Reject::kAddress)] = forged_packets_;
    stats.socket = socket_.counters();
    stats.uncorrected_packets = uncorrected_packets_;
    stats.pool_used_bytes = core_->pool_used_bytes();
    stats.memory_bytes = core_->memory_bytes();
    stats.contributing = core_->contributing();
    stats.rtt.resize(ranks_);
    for (Rank rank = 0; rank < ranks_; ++rank) stats.rtt[rank] = core_->rtt(rank);
}

// Called under the lock, when the engine has no submission in hand. The group's seq only grows, so one that was
// heard a while ago makes a rank compute a step that it could have skipped, and not the reverse.
void UdpLane::take_progress() {
    shared_->next_seq = core_->next_seq();
    shared_->group_seq = core_->group_seq();
    shared_->heard_epoch = core_->heard_epoch();
}

void UdpLane::sleep() {
    {
        const std::lock_guard lock(shared_->mutex);
        if (shared_->commands()) return;
        shared_->asleep = true;
        take_stats();
        take_progress();
    }
    pollfd waits[] = {{socket_.descriptor(), static_cast<short>(POLLIN | (blocked_ ? POLLOUT : 0)), 0},
                      {wake_descriptor_, POLLIN, 0},
                      {socket_.group_descriptor(), POLLIN, 0},  // poll() ignores -1
                      {trimmed_.descriptor(), POLLIN, 0}};
    const Time until = std::min(core_->next_timer(), linger_until_);
    timespec left{3600, 0};
    if (until != kNever) {
        const Duration wait = std::max<Duration>(0, until - clock_now());
        left = {wait / 1'000'000'000, wait % 1'000'000'000};
    }
    ::ppoll(waits, std::size(waits), &left, nullptr);
    const std::lock_guard lock(shared_->mutex);
    shared_->asleep = false;
    if (waits[1].revents & POLLIN) {
        std::uint64_t count;
        while (::read(wake_descriptor_, &count, sizeof count) < 0 && errno == EINTR) {
        }
    }
}

}  // namespace tailcut
