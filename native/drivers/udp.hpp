// One lane: a socket, the protocol's core, and the engine thread that connects the two. This is the only
// place with threads. Callers submit ops and wait for reports; everything else happens on the engine thread.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "drivers/ledger_file.hpp"
#include "drivers/open_ops.hpp"
#include "drivers/socket.hpp"
#include "drivers/trimmed.hpp"
#include "protocol/core.hpp"
#include "protocol/sending/path.hpp"
#include "protocol/state/state_channel.hpp"

namespace tailcut {

struct LaneStats {
    Counters protocol;
    SocketCounters socket;
    std::uint64_t uncorrected_packets = 0;  // trimmed, and seen only by the packet socket
    std::uint64_t pool_used_bytes = 0, memory_bytes = 0;
    std::vector<Duration> rtt;  // by rank
    bool contributing = true;
};

class UdpLane {
public:
    // Binds at once, so that the port can be published before the peers are known.
    UdpLane(std::uint32_t bind_ipv4, std::uint32_t receive_buffer_bytes, bool offload);
    ~UdpLane();  // aborts what is in flight

    int descriptor() const { return socket_.descriptor(); }  // for the handshake before start()
    std::size_t ranks() const { return ranks_; }             // after start()
    std::uint16_t port() const { return socket_.port(); }
    std::uint32_t receive_buffer_bytes() const { return socket_.receive_buffer_bytes(); }

    // Before start(): marks what is sent with this DSCP, 0 to 63.
    void mark(int dscp) { socket_.mark(dscp); }
    // Before start(): joins a multicast group, which then is the destination after the last rank. Throws
    // std::system_error if that is not possible.
    void join_multicast(const MulticastGroup& group) { socket_.join(group); }
    void leave_multicast() { socket_.leave(); }
    int group_descriptor() const { return socket_.group_descriptor(); }  // -1: not a member
    // Before start(): also receives datagrams whose lengths a trimming switch did not correct. Throws
    // std::system_error if that is not permitted. Multicast datagrams are excluded: they count as lost.
    void receive_trimmed() { trimmed_.open(socket_.port()); }

    // Before start(): the engine thread keeps these. `head` is what each of its records begins with.
    void keep_ledger(std::shared_ptr<LedgerFile> ledger, std::unique_ptr<OpenOps> open,
                     std::vector<std::byte> head);

    // `addresses` by rank: where to send. `sources` by rank: where its datagrams may come from. A rank with
    // several interfaces may send from another one than it is reached at.
    void start(const Settings& settings, const std::vector<PeerSettings>& peers,
               std::vector<Address> addresses, std::vector<std::vector<Address>> sources);

    // The bucket must stay valid until its report is there.
    Ticket submit(std::span<float> bucket, const Terms& terms);
    // Takes effect before the next submission, which is the first op that it can affect.
    void notify(std::function<void(Core&)> notice);
    // These take effect as soon as the engine thread comes to them.
    void install(Epoch epoch);
    void set_away(bool away);
    // Blocks for at most `timeout`. The report stays until drop_report(), so that a caller that is interrupted can
    // ask again.
    bool wait(Ticket ticket, Duration timeout, OpReport& report);
    void drop_report(Ticket ticket);

    // Blobs that ranks fetch from each other (protocol/state/). In a grid a fetch stays pending.
    void offer(std::uint64_t id, Blob blob);
    void withdraw(std::uint64_t id);
    Ticket fetch(Rank server, std::uint64_t id, std::uint64_t most_bytes);
    void cancel(Ticket ticket);  // nobody will take it
    // Blocks for at most `timeout`, and takes what came. A fetch that is under way is pending.
    Fetched take_fetched(Ticket ticket, Duration timeout);
    // Blobs of a rejoin that others have asked for in vain since the last call, by rank.
    std::map<Rank, std::uint64_t> take_wanted();

    // Why the engine stopped; empty while it runs. Ops then end with Status::kFailed.
    std::string failure() const;

    // Says goodbye, serves for at most `linger`, then ends. Returns at once; a second call can shorten the
    // linger.
    void close(Duration linger);
    // Blocks for at most `timeout` until the engine thread has ended, then frees what it held.
    bool join(Duration timeout);
    LaneStats stats() const;
    // How many ops at least half of the other ranks present are known to have entered and this rank has not,
    // submissions that the engine has not seen included.
    Seq behind_ops() const;
    // The latest epoch that anybody has spoken of: reports tell it too, but a rank that is behind ends no ops.
    std::uint16_t heard_epoch() const;

    // For a forked child, where the engine thread does not exist: drops the descriptors and touches nothing
    // else.
    void abandon();

private:
    struct Submission {
        Ticket ticket;
        std::span<float> bucket;
        Terms terms;
    };

    using StateCommand = std::function<void(StateChannel&)>;

    void command(StateCommand command);  // called under the lock
    void run();
    void serve();
    void take_commands();
    bool receive(std::size_t most_bytes);
    void take(Time now, std::span<const std::byte> datagram, const Address& from);
    std::size_t receive_trimmed_packets();
    bool writable() const;
    bool send();
    void record();
    void publish();
    void sleep();
    void take_stats();
    void take_progress();
    void wake();
    Status end_status() const;

    const pid_t process_;
    Socket socket_;
    TrimmedSocket trimmed_;
    int wake_descriptor_ = -1;

    // used by the engine thread only
    std::unique_ptr<Core> core_;
    std::vector<Address> addresses_;             // by rank
    std::vector<std::vector<Address>> sources_;  // by rank
    std::size_t ranks_ = 0;
    std::vector<Outgoing> batch_;
    bool blocked_ = false;                // the socket is full
    std::shared_ptr<LedgerFile> ledger_;  // or null
    std::unique_ptr<OpenOps> open_;       // or null
    std::vector<std::byte> record_head_;
    std::size_t recorded_ = 0;  // of the core's reports: those that open_ has
    std::uint64_t uncorrected_packets_ = 0, forged_packets_ = 0;
    bool closing_ = false;
    Time linger_until_ = kNever;

    struct Shared {
        std::mutex mutex;  // guards the whole struct
        std::condition_variable reported;
        std::vector<Submission> submissions;
        std::vector<std::function<void(Core&)>> notices;
        std::optional<bool> away;
        std::vector<Epoch> epochs;  // to be installed
        std::unordered_map<Ticket, OpReport> reports;
        std::vector<StateCommand> state_commands;
        std::unordered_map<Ticket, Fetched> fetched;
        std::map<Rank, std::uint64_t> wanted;
        LaneStats stats;
        Seq next_seq = 0, group_seq = 0;  // after the submissions that the engine has taken; as last heard
        std::uint16_t heard_epoch = 0;
        Ticket next_ticket = 1;
        Duration close_linger = -1;  // < 0: stay open
        bool close_changed = false, asleep = false, ended = false;
        std::array<char, 256> failure{};  // not allocated: it may say that there is no memory

        bool commands() const {  // notices wait for a submission
            return !submissions.empty() || !state_commands.empty() || !epochs.empty() || away ||
                   close_changed;
        }
    };
    std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();

    std::unique_ptr<std::thread> engine_;
};

}  // namespace tailcut
