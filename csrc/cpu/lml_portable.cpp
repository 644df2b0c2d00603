#define SK_VEC_BYTES 16
#define SK_REGISTERS 16
#include "cpu/lml_kernel.h"

namespace sk {
const LmlKernels lml_portable = {"portable", LmlRow<float>::run, LmlRow<double>::run};
}
