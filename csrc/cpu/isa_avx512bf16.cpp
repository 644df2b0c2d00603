// bfloat16 alone; other types take isa_avx512.cpp.
#define SK_VEC_BYTES 64
#define SK_REGISTERS 32
#define SK_DOT2 1
#include "cpu/tiles.h"

namespace sk {
extern const Kernels kernels_avx512bf16{"avx512bf16", kPanelBytes, workspace_bytes, run, merge};
}
