// The 64-byte source of isa_avx512.cpp on AVX2 instructions: slow, and the way to test that source on a CPU without
// AVX-512.  Chosen only by name.
#define SK_VEC_BYTES 64
#define SK_REGISTERS 32
#include "cpu/tiles.h"

namespace sk {
extern const Kernels kernels_wide{"wide", SK_VEC_BYTES, workspace_bytes, run};
}
