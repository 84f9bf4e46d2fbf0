#include "drivers/open_ops.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace tailcut {

OpenOps::OpenOps(int descriptor, std::size_t bytes) : bytes_(bytes) {
    // Without room on the disk a store to the mapping would end the process.
    int error = ::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
    if (error == 0) {
        void* const memory =
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
        if (memory == MAP_FAILED)
            error = errno;
        else
            memory_ = static_cast<std::byte*>(memory);
    }
    ::close(descriptor);
    if (error != 0) throw std::system_error(error, std::generic_category());
}

OpenOps::~OpenOps() { ::munmap(memory_, bytes_); }

void OpenOps::put(LedgerKind kind, std::span<const std::byte> head, std::span<const std::byte> rest) {
    payload_.assign(head.begin(), head.end());
    payload_.insert(payload_.end(), rest.begin(), rest.end());
    frame_.clear();
    put_frame(frame_, number_++, kind, payload_);
    if (frame_.size() > bytes_) return;
    if (at_ + frame_.size() > bytes_) at_ = 0;
    std::memcpy(memory_ + at_, frame_.data(), frame_.size());
    at_ += frame_.size();
}

}  // namespace tailcut
