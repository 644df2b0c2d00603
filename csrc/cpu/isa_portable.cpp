#define SK_VEC_BYTES 16
#define SK_REGISTERS 16
#include "cpu/tiles.h"

namespace sk {
extern const Kernels kernels_portable{"portable", kPanelBytes, workspace_bytes, run, merge};
}
