#include "codec/dispatch.hpp"

#include <atomic>

namespace tailcut::codec {
namespace {

// The codec's only mutable state: a switch for tests.
std::atomic<bool> scalar_wanted{false};

bool has_vectors() {
#if defined(__x86_64__)
    static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has;
#elif defined(__aarch64__)
    return true;
#else
    return false;
#endif
}

}  // namespace

bool use_vector_kernels() { return has_vectors() && !scalar_wanted.load(std::memory_order_relaxed); }
void use_scalar_kernels(bool scalar) { scalar_wanted.store(scalar, std::memory_order_relaxed); }

}  // namespace tailcut::codec
