#include "drivers/ledger_file.hpp"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "drivers/ledger_frames.hpp"

namespace tailcut {
namespace {

struct Record {
    LedgerKind kind;
    std::vector<std::byte> payload;
};

std::vector<std::byte> gap_of(std::uint64_t records, const std::string& reason) {
    const std::string text = "{\"records\":" + std::to_string(records) + ",\"reason\":\"" + reason + "\"}";
    const auto bytes = std::as_bytes(std::span(text));
    return {bytes.begin(), bytes.end()};
}

}  // namespace

struct LedgerFile::State {
    int file;
    std::size_t most_waiting_bytes;

    mutable std::mutex mutex;  // guards what follows
    std::condition_variable changed;
    std::vector<Record> waiting;
    std::size_t waiting_bytes = 0;
    std::size_t writing = 0;  // records that are on their way to the disk
    std::uint64_t left_out = 0;
    std::string problem;
    bool closing = false, closed = false;

    // the thread's own
    std::uint64_t number = 0;  // of the next record
    off_t size = 0;            // of the file, up to its last whole record

    void run();
    bool write(std::span<const std::byte> content, std::string& problem);
};

LedgerFile::LedgerFile(int descriptor, std::size_t most_waiting_bytes) : state_(std::make_shared<State>()) {
    state_->file = descriptor;
    state_->most_waiting_bytes = most_waiting_bytes;
    std::thread([state = state_] { state->run(); }).detach();
}

LedgerFile::~LedgerFile() { close(0); }

void LedgerFile::append(LedgerKind kind, std::span<const std::byte> head, std::span<const std::byte> rest) {
    Record record{kind, {head.begin(), head.end()}};
    record.payload.insert(record.payload.end(), rest.begin(), rest.end());
    const std::lock_guard lock(state_->mutex);
    if (state_->closing) return;
    if (state_->waiting_bytes + record.payload.size() > state_->most_waiting_bytes) {
        ++state_->left_out;
        state_->problem = "the disk is too slow";
        return;
    }
    state_->waiting_bytes += record.payload.size();
    state_->waiting.push_back(std::move(record));
    state_->changed.notify_all();
}

LedgerFile::Progress LedgerFile::progress() const {
    const std::lock_guard lock(state_->mutex);
    return {state_->waiting.size() + state_->writing, state_->left_out, state_->problem};
}

bool LedgerFile::close(Duration limit) {
    std::unique_lock lock(state_->mutex);
    state_->closing = true;
    state_->changed.notify_all();
    return state_->changed.wait_for(lock, std::chrono::nanoseconds(limit), [&] { return state_->closed; });
}

void LedgerFile::State::run() {
    std::vector<std::byte> content;
    std::unique_lock lock(mutex);
    for (;;) {
        changed.wait(lock, [&] { return closing || !waiting.empty(); });
        if (waiting.empty()) break;
        const std::vector<Record> records = std::exchange(waiting, {});
        writing = records.size();
        const std::uint64_t gap = left_out;
        std::string reason = problem;
        lock.unlock();

        content.clear();
        std::uint64_t next = number;
        if (gap > 0) put_frame(content, next++, LedgerKind::kGap, gap_of(gap, reason));
        for (const Record& record : records) put_frame(content, next++, record.kind, record.payload);
        const bool written = write(content, reason);
        if (written) number = next;

        lock.lock();
        for (const Record& record : records) waiting_bytes -= record.payload.size();
        writing = 0;
        if (written) {
            left_out -= gap;
        } else {
            left_out += records.size();
            problem = reason;
        }
        changed.notify_all();
    }
    ::close(file);
    closed = true;
    changed.notify_all();
}

// All of it or nothing. Where even that fails, a reader finds the next whole record.
bool LedgerFile::State::write(std::span<const std::byte> content, std::string& reason) {
    const auto whole = static_cast<off_t>(content.size());
    while (!content.empty()) {
        const ssize_t written = ::write(file, content.data(), content.size());
        if (written < 0) {
            if (errno == EINTR) continue;
            reason = std::generic_category().message(errno);
            if (::ftruncate(file, size) == 0) ::lseek(file, size, SEEK_SET);
            return false;
        }
        content = content.subspan(static_cast<std::size_t>(written));
    }
    size += whole;
    return true;
}

}  // namespace tailcut
