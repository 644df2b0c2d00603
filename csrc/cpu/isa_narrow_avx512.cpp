// Panels of one vector, for batches that do not fill two.
#define SK_VEC_BYTES 64
#define SK_REGISTERS 32
#define SK_PANEL_VECTORS 1
#include "cpu/tiles.h"

namespace sk {
extern const Kernels kernels_avx512_narrow{"avx512", kPanelBytes, workspace_bytes, run, merge};
}
