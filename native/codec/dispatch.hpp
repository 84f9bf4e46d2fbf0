// Selects the kernels: the scalar twins, or those for the processor's vectors, which are AVX2 with FMA where it
// has them, and NEON, which every 64-bit ARM has. The choice is made on first use. All give the same bits.
#pragma once

#if defined(__x86_64__) || defined(__aarch64__)
#define TAILCUT_VECTOR_KERNELS  // *_avx2.cpp or *_neon.cpp defines them
#endif

namespace tailcut::codec {

bool use_vector_kernels();

// For tests, which compare the two. Must not be called while another thread encodes or decodes.
void use_scalar_kernels(bool scalar);

}  // namespace tailcut::codec
