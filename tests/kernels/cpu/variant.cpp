// The tile loop for vectors of SK_VEC_BYTES, whatever the processor has; SK_NAME is what the program calls it.
#include "cpu/tiles.h"

namespace sk {
extern const Kernels SK_NAME{"variant", kPanelBytes, workspace_bytes, run, merge};
}
