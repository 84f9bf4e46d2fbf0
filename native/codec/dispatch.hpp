// Which kernels run: the scalar twins or AVX2 with FMA, decided by the processor when first asked. Both give the same bits.
#pragma once

namespace tailcut::codec {

bool use_avx2();

// For tests, which hold the two to each other. Not to be called while another thread encodes or decodes.
void use_scalar_kernels(bool scalar);

}  // namespace tailcut::codec
