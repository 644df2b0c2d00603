#define SK_VEC_BYTES 32
#define SK_REGISTERS 16
#include "cpu/tiles.h"

namespace sk {
extern const Kernels kernels_avx2{"avx2", kPanelBytes, workspace_bytes, run, merge};
}
