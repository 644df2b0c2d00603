#if defined(__x86_64__) || defined(_M_X64)
#define SK_VEC_BYTES 32
#define SK_REGISTERS 16
#include "cpu/lml_kernel.h"

namespace sk {
const LmlKernels lml_avx2 = {"avx2", LmlRow<float>::run, LmlRow<double>::run};
}
#endif
