#define SK_VEC_BYTES 64
#define SK_REGISTERS 32
#include "cpu/tiles.h"

namespace sk {
extern const Kernels kernels_avx512{"avx512", kPanelBytes, workspace_bytes, run, merge};
}
