// Python module sigkernels._cuda: raw pointers, sizes and the stream in, nothing out.  No torch, no numpy.
#include <pybind11/pybind11.h>

#include <iterator>
#include <type_traits>

#include "launch.h"

#ifndef SK_CUDA_ARCHS
#define SK_CUDA_ARCHS ""  // "8.0;9.0+PTX": what setup.py compiles for; empty where nobody says
#endif

namespace py = pybind11;
using Address = uintptr_t;  // of device memory; 0 for what is not there

namespace {

sk::DType dtype_of(const std::string& name) {
    if (name == "tf32") return sk::DType::tf32;
    if (name == "float16") return sk::DType::f16;
    if (name == "bfloat16") return sk::DType::bf16;
    throw py::value_error("dtype must be tf32, float16 or bfloat16, got '" + name + "'");
}

// The fields of a launch and of a loss, in the order in which they are handed over: names would take three times as long.
#define FLASH_FIELDS(F)                                                                                              \
    F(x) F(weight) F(bias) F(basis) F(coef) F(waves) F(blank) F(features) F(wave_steps) F(x_stride) F(batch) F(labels) F(slack) \
    F(block_labels) F(blocks) F(indices) F(offsets) F(dense) F(dense_type) F(dense_stride) F(label_start)              \
    F(label_weight) F(pos_weight) F(row_factor) F(out_scale) F(scale) F(wide) F(accumulate) F(numbers) F(constant)     \
    F(grad_weight) F(grad_bias) F(grad_coef) F(weight_sums) F(bias_sums) F(slabs) F(row_sums) F(totals) F(turns) F(factors)
#define LOSS_FIELDS(F)                                                                                     \
    F(kind) F(label_smoothing) F(gamma_pos) F(gamma_neg) F(alpha_pos) F(alpha_neg) F(clip) F(eps) F(detach_focus)
#define NAME(name) #name,
constexpr const char* flash_fields[] = {FLASH_FIELDS(NAME)};
constexpr const char* loss_fields[] = {LOSS_FIELDS(NAME)};
#undef NAME

template <size_t N>
py::tuple names_of(const char* const (&names)[N]) {
    py::tuple made(N);
    for (size_t i = 0; i < N; ++i) made[i] = py::str(names[i]);
    return made;
}

// A tuple's numbers, one after the other.
class Numbers {
  public:
    Numbers(const py::tuple& numbers, size_t count) : numbers_(numbers) {
        if (numbers.size() != count) throw py::value_error("a launch and its loss must have all their fields");
    }

    template <class T>
    void read(T& field) {
        if constexpr (std::is_pointer_v<T>) field = reinterpret_cast<T>(numbers_[next_++].cast<Address>());
        else if constexpr (std::is_enum_v<T>) field = static_cast<T>(numbers_[next_++].cast<int>());
        else field = numbers_[next_++].cast<T>();
    }

  private:
    const py::tuple& numbers_;
    size_t next_ = 0;
};

sk::LossParams loss_of(const py::tuple& settings) {
    sk::LossParams loss;
    Numbers numbers(settings, std::size(loss_fields));
#define READ(name) numbers.read(loss.name);
    LOSS_FIELDS(READ)
#undef READ
    if (loss.kind != sk::LossKind::bce && loss.kind != sk::LossKind::focal && loss.kind != sk::LossKind::asymmetric)
        throw py::value_error("loss kind must be 0 (BCE), 1 (focal) or 2 (asymmetric)");
    return loss;
}

sk::Flash flash_of(const std::string& dtype, const py::tuple& loss, const py::tuple& fields) {
    sk::Flash f{};
    f.dtype = dtype_of(dtype), f.loss = loss_of(loss);
    Numbers numbers(fields, std::size(flash_fields));
#define READ(name) numbers.read(f.name);
    FLASH_FIELDS(READ)
#undef READ
    if (f.batch < 1 || f.labels < 1 || f.labels > INT32_MAX - 256 || f.slack < 1 || f.slack > sk::widest_slack() ||
        f.block_labels < 1 || f.block_labels % sk::tile_labels() || f.blocks * f.block_labels < f.labels ||
        (f.blocks - 1) * f.block_labels >= f.labels)
        throw py::value_error("batch, labels, slack, block_labels and blocks must be sizes that belong together");
    return f;
}

}  // namespace

PYBIND11_MODULE(_cuda, m, py::mod_gil_not_used()) {
    m.doc() = "CUDA kernels of sigkernels; used through sigkernels.backends.cuda";
    py::register_exception<sk::CudaError>(m, "CudaError", PyExc_RuntimeError);
    py::class_<sk::Flash>(m, "Flash").def(py::init(&flash_of), py::arg("dtype"), py::arg("loss"), py::arg("fields"));

    m.def(
        "fused_loss",
        [](int device, Address stream, const sk::Flash& flash) {
            const py::gil_scoped_release release;
            sk::fused_loss({device, reinterpret_cast<void*>(stream)}, flash);
        },
        py::arg("device"), py::arg("stream"), py::arg("flash"));
    m.def(
        "finish",
        [](int device, Address stream, const sk::Flash& flash, Address grad_x, Address grad_features, int64_t features,
           int64_t stride, bool wide, Address rows, Address value) {
            const py::gil_scoped_release release;
            sk::finish({device, reinterpret_cast<void*>(stream)}, flash,
                       {reinterpret_cast<void*>(grad_x), reinterpret_cast<void*>(grad_features), features, stride, wide,
                        reinterpret_cast<double*>(rows), reinterpret_cast<float*>(value)});
        },
        py::arg("device"), py::arg("stream"), py::arg("flash"), py::kw_only(), py::arg("grad_x"), py::arg("grad_features"),
        py::arg("features"), py::arg("stride"), py::arg("wide"), py::arg("rows"), py::arg("value"));

    m.def("sizes_of_block", [](const std::string& dtype, int64_t batch, int64_t slack, int device) {
        return sk::sizes_of_block(dtype_of(dtype), batch, slack, device);
    });
    m.def("processors", &sk::processors);
    m.def("device_count", &sk::device_count);
    m.def("devices", &sk::devices);
    m.def("versions", &sk::versions);
    m.def("capability", &sk::capability);
    m.attr("TILE") = sk::tile_labels();
    m.attr("FLASH_FIELDS") = names_of(flash_fields);
    m.attr("LOSS_FIELDS") = names_of(loss_fields);
    m.attr("WIDEST") = sk::widest_slack();
    m.attr("ARCHITECTURES") = SK_CUDA_ARCHS;
}
