// The tall micro-kernels of a 32-register machine on portable instructions, for tests.
#define SK_VEC_BYTES 16
#define SK_REGISTERS 32
#include "cpu/tiles.h"

namespace sk {
extern const Kernels kernels_tall{"tall", kPanelBytes, workspace_bytes, run, merge};
}
