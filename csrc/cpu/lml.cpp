// Rows of the LML projection over threads, and its Python binding.
#include "cpu/lml.h"

#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace sk {
namespace {

enum class Dtype : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };

const LmlKernels& kernels_for(const std::string& isa) {
#if defined(__x86_64__) || defined(_M_X64)
    if (isa == "avx512") return lml_avx512;
    if (isa == "avx2") return lml_avx2;
#endif
    if (isa == "portable") return lml_portable;
    throw std::invalid_argument("unknown instruction set '" + isa + "'");
}

float f32_of(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
uint32_t bits_of(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

void widen_bf16(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = f32_of(static_cast<uint32_t>(from[i]) << 16);
}
void narrow_bf16(const float* from, uint16_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t b = bits_of(from[i]);
        const uint32_t rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;  // to nearest, ties to even
        to[i] = static_cast<uint16_t>((b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}
void widen_f16(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t h = from[i], magnitude = (h & 0x7fffu) << 13;
        // 2^112 moves the exponent from half's bias to float's, subnormals included
        float f = f32_of(magnitude) * 0x1p112f;
        if ((h & 0x7c00u) == 0x7c00u) f = f32_of(magnitude | 0x7f800000u);
        to[i] = f32_of(bits_of(f) | ((h & 0x8000u) << 16));
    }
}
void narrow_f16(const float* from, uint16_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t b = bits_of(from[i]), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
        uint32_t h;
        if (a > 0x7f800000u) {
            h = 0x7e00u;
        } else if (a >= 0x477ff000u) {
            h = 0x7c00u;  // rounds beyond the largest half
        } else if (a < 0x38800000u) {
            h = bits_of(f32_of(a) + 0.5f) - 0x3f000000u;  // subnormal: the addition rounds at 2^-24
        } else {
            h = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13;
        }
        to[i] = static_cast<uint16_t>(h | sign);
    }
}

// 16-bit rows go through buffers of a thread: three rows, never a matrix.
struct HalfRow {
    std::vector<float> z, grad, out;
};

void run_rows(const LmlJob& job, const LmlKernels& kernels, Dtype dtype, int64_t rows, const char* z, const char* grad,
              char* out, int threads) {
    const int64_t n = job.n, bytes = n * (dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2);
    const auto widen = dtype == Dtype::bf16 ? widen_bf16 : widen_f16;
    const auto narrow = dtype == Dtype::bf16 ? narrow_bf16 : narrow_f16;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows > 1)
    {
        HalfRow half;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < rows; ++b) {
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
                widen(reinterpret_cast<const uint16_t*>(zr), half.z.data(), n);
                if (gr) widen(reinterpret_cast<const uint16_t*>(gr), half.grad.data(), n);
                kernels.row_f32(job, b, half.z.data(), half.grad.data(), half.out.data());
                if (yr) narrow(half.out.data(), reinterpret_cast<uint16_t*>(yr), n);
            }
        }
    }
}

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_lml(py::module_& m) {
    m.def(
        "lml",
        [](int step, int dtype, int64_t rows, int64_t n, int64_t k, uintptr_t z, uintptr_t grad, uintptr_t out,
           uintptr_t nu, uintptr_t slope, uintptr_t total, const std::string& isa, int threads) {
            LmlJob job;
            job.step = static_cast<LmlStep>(step);
            job.n = n, job.k = k;
            job.nu = pointer<double>(nu), job.slope = pointer<double>(slope), job.total = pointer<double>(total);
            const LmlKernels& kernels = kernels_for(isa);
            py::gil_scoped_release release;
            run_rows(job, kernels, static_cast<Dtype>(dtype), rows, pointer<char>(z), pointer<char>(grad),
                     pointer<char>(out), threads);
        },
        py::kw_only(), py::arg("step"), py::arg("dtype"), py::arg("rows"), py::arg("n"), py::arg("k") = 0, py::arg("z"),
        py::arg("grad") = 0, py::arg("out") = 0, py::arg("nu"), py::arg("slope"), py::arg("total") = 0, py::arg("isa"),
        py::arg("threads"),
        "One step of the LML projection on contiguous rows, given by address; see csrc/cpu/lml.h.");
}

}  // namespace sk
