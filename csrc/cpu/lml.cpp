// Rows of the LML projection over threads, and its Python binding.
#include "cpu/lml.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <vector>

#define SK_VEC_BYTES 16  // for the conversions of convert.h; this file is not compiled per instruction set
#define SK_REGISTERS 16
#include "cpu/convert.h"
#include "cpu/driver.h"
#include "cpu/threads.h"

namespace py = pybind11;

namespace sk {
namespace {

// The kernels of the instruction set that a call with this name would use.
const LmlKernels& kernels_for(const std::string& isa) {
    const std::string name = choose_isa(isa).kernels->name;
#if defined(__x86_64__) || defined(_M_X64)
    if (name == "avx512") return lml_avx512;
    if (name == "avx2") return lml_avx2;
#endif
    return lml_portable;
}

template <class E>
void widen_row(const char* from, float* to, int64_t n) {
    const E* e = reinterpret_cast<const E*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = widen<float>(e[i]);
}
template <class E>
void narrow_row(const float* from, char* to, int64_t n) {
    E* e = reinterpret_cast<E*>(to);
    for (int64_t i = 0; i < n; ++i) e[i] = Narrow<E, float>::from(from[i]);
}

// 16-bit rows go through buffers of a thread: three rows, never a matrix.
struct HalfRow {
    std::vector<float> z, grad, out;
};

struct Rows {
    const LmlJob& job;
    const LmlKernels& kernels;
    Dtype dtype;
    int64_t rows;
    const char *z, *grad;
    char* out;
    int64_t tasks;

    void run(int64_t task) const {
        const int64_t n = job.n, bytes = n * (dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2);
        const auto widen_16 = dtype == Dtype::bf16 ? widen_row<Bf16> : widen_row<F16>;
        const auto narrow_16 = dtype == Dtype::bf16 ? narrow_row<Bf16> : narrow_row<F16>;
        HalfRow half;
        for (int64_t b = rows * task / tasks; b < rows * (task + 1) / tasks; ++b) {
            const char *zr = z + b * bytes, *gr = grad ? grad + b * bytes : nullptr;
            char* yr = out ? out + b * bytes : nullptr;
            if (dtype == Dtype::f32) {
                kernels.row_f32(job, b, reinterpret_cast<const float*>(zr), reinterpret_cast<const float*>(gr),
                                reinterpret_cast<float*>(yr));
            } else if (dtype == Dtype::f64) {
                kernels.row_f64(job, b, reinterpret_cast<const double*>(zr), reinterpret_cast<const double*>(gr),
                                reinterpret_cast<double*>(yr));
            } else {
                half.z.resize(n), half.grad.resize(gr ? n : 0), half.out.resize(yr ? n : 0);
                widen_16(zr, half.z.data(), n);
                if (gr) widen_16(gr, half.grad.data(), n);
                kernels.row_f32(job, b, half.z.data(), half.grad.data(), half.out.data());
                if (yr) narrow_16(half.out.data(), yr, n);
            }
        }
    }
};

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_lml(py::module_& m) {
    m.def(
        "lml",
        [](int step, int dtype, int64_t rows, int64_t n, int64_t k, uintptr_t z, uintptr_t grad, uintptr_t out,
           uintptr_t nu, uintptr_t slope, uintptr_t total, int threads) {
            LmlJob job;
            job.step = static_cast<LmlStep>(step);
            job.n = n, job.k = k;
            job.nu = pointer<double>(nu), job.slope = pointer<double>(slope), job.total = pointer<double>(total);
            const LmlKernels& kernels = kernels_for(forced_isa());
            py::gil_scoped_release release;
            const Rows all{job, kernels, static_cast<Dtype>(dtype), rows, pointer<char>(z), pointer<char>(grad),
                           pointer<char>(out), std::min<int64_t>(rows, 4 * int64_t{threads})};
            for_tasks(threads, all.tasks, [&](int64_t task) { all.run(task); });
        },
        py::kw_only(), py::arg("step"), py::arg("dtype"), py::arg("rows"), py::arg("n"), py::arg("k") = 0, py::arg("z"),
        py::arg("grad") = 0, py::arg("out") = 0, py::arg("nu"), py::arg("slope"), py::arg("total") = 0, py::arg("threads"),
        "One step of the LML projection on contiguous rows, given by address; see csrc/cpu/lml.h.");
}

}  // namespace sk
