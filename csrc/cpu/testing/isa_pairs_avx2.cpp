// isa_avx512bf16.cpp with its instruction spelled out, and on short vectors.
#define SK_VEC_BYTES 32
#define SK_REGISTERS 16
#define SK_DOT2 1
#include "cpu/tiles.h"

namespace sk {
extern const Kernels kernels_pairs{"pairs", kPanelBytes, workspace_bytes, run, merge};
}
