// Selects the kernels: the scalar twins, or AVX2 with FMA if the processor has it. The choice is made on
// first use. Both give the same bits.
#pragma once

namespace tailcut::codec {

bool use_avx2();

// For tests, which compare the two. Must not be called while another thread encodes or decodes.
void use_scalar_kernels(bool scalar);

}  // namespace tailcut::codec
