#if defined(__x86_64__) || defined(_M_X64)
#define SK_VEC_BYTES 64
#define SK_REGISTERS 32
#include "cpu/lml_kernel.h"

namespace sk {
const LmlKernels lml_avx512 = {"avx512", LmlRow<float>::run, LmlRow<double>::run};
}
#endif
