// The vectors of isa_avx512.cpp on AVX2 instructions: slow, and the way to run that source on a CPU without AVX-512.
// Built with SIGKERNELS_TEST_ISA=1 and chosen only by name, like isa_tall.cpp.
#define SK_VEC_BYTES 64
#define SK_REGISTERS 16
#include "cpu/tiles.h"

namespace sk {
extern const Kernels kernels_wide{"wide", kPanelBytes, workspace_bytes, run, merge};
}
