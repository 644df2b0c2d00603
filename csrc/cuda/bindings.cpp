// Python module sigkernels._cuda: raw pointers, sizes and the stream in, nothing out.  No torch, no numpy.
#include <pybind11/pybind11.h>

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

sk::LossParams loss_of(const py::dict& settings) {
    sk::LossParams loss;
    loss.kind = static_cast<sk::LossKind>(settings["kind"].cast<int>());
    if (loss.kind != sk::LossKind::bce && loss.kind != sk::LossKind::focal && loss.kind != sk::LossKind::asymmetric)
        throw py::value_error("loss kind must be 0 (BCE), 1 (focal) or 2 (asymmetric)");
    loss.label_smoothing = settings["label_smoothing"].cast<double>();
    loss.gamma_pos = settings["gamma_pos"].cast<double>(), loss.gamma_neg = settings["gamma_neg"].cast<double>();
    loss.alpha_pos = settings["alpha_pos"].cast<double>(), loss.alpha_neg = settings["alpha_neg"].cast<double>();
    loss.clip = settings["clip"].cast<double>(), loss.eps = settings["eps"].cast<double>();
    loss.detach_focus = settings["detach_focus"].cast<bool>();
    return loss;
}

// A launch from its fields by name; all of them are needed.
class Fields {
  public:
    explicit Fields(const py::kwargs& fields) : fields_(fields) {}

    template <class T>
    void read(const char* name, T& field) const {
        field = fields_[name].template cast<T>();
    }
    template <class T>
    void read(const char* name, T*& field) const {
        field = reinterpret_cast<T*>(fields_[name].cast<Address>());
    }

  private:
    const py::kwargs& fields_;
};

sk::Flash flash_of(const std::string& dtype, const py::dict& loss, const py::kwargs& kwargs) {
    sk::Flash f{};
    f.dtype = dtype_of(dtype), f.loss = loss_of(loss);
    const Fields fields(kwargs);
#define READ(name) fields.read(#name, f.name)
    READ(x), READ(weight), READ(bias), READ(basis), READ(coef), READ(x_stride), READ(batch), READ(labels), READ(slack);
    READ(block_labels), READ(blocks), READ(indices), READ(offsets), READ(dense), READ(dense_type), READ(dense_stride);
    READ(label_start), READ(label_weight), READ(pos_weight), READ(row_factor), READ(out_scale), READ(scale), READ(wide);
    READ(accumulate), READ(grad_weight), READ(grad_bias), READ(grad_coef), READ(weight_sums), READ(bias_sums);
    READ(slabs), READ(row_sums), READ(totals);
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
    py::class_<sk::Flash>(m, "Flash").def(py::init(&flash_of), py::arg("dtype"), py::arg("loss"));

    m.def(
        "fused_loss",
        [](int device, Address stream, const sk::Flash& flash) {
            const py::gil_scoped_release release;
            sk::fused_loss({device, reinterpret_cast<void*>(stream)}, flash);
        },
        py::arg("device"), py::arg("stream"), py::arg("flash"));
    m.def(
        "finish",
        [](int device, Address stream, const sk::Flash& flash, Address grad_x, int64_t stride, bool wide, Address rows,
           Address value) {
            const py::gil_scoped_release release;
            sk::finish({device, reinterpret_cast<void*>(stream)}, flash, reinterpret_cast<void*>(grad_x), stride, wide,
                       reinterpret_cast<double*>(rows), reinterpret_cast<float*>(value));
        },
        py::arg("device"), py::arg("stream"), py::arg("flash"), py::kw_only(), py::arg("grad_x"), py::arg("stride"),
        py::arg("wide"), py::arg("rows"), py::arg("value"));

    m.def("rows_of_block", [](const std::string& dtype, int64_t batch, int64_t slack, int device) {
        return sk::rows_of_block(dtype_of(dtype), batch, slack, device);
    });
    m.def("processors", &sk::processors);
    m.def("device_count", &sk::device_count);
    m.def("devices", &sk::devices);
    m.def("versions", &sk::versions);
    m.def("capability", &sk::capability);
    m.attr("TILE") = sk::tile_labels();
    m.attr("WIDEST") = sk::widest_slack();
    m.attr("ARCHITECTURES") = SK_CUDA_ARCHS;
}
