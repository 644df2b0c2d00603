// Python module sigkernels._cuda: raw pointers, sizes and the stream in, nothing out.  No torch, no numpy.
#include <pybind11/pybind11.h>

#include "launch.h"

namespace py = pybind11;
using Address = uintptr_t;  // of device memory; 0 for what is not there

namespace {

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

sk::DType dtype_of(const std::string& name) {
    if (name == "float32") return sk::DType::f32;
    if (name == "tf32") return sk::DType::tf32;
    if (name == "float16") return sk::DType::f16;
    if (name == "bfloat16") return sk::DType::bf16;
    if (name == "float64") return sk::DType::f64;
    throw py::value_error("dtype must be float32, tf32, float16, bfloat16 or float64, got '" + name + "'");
}

sk::LossParams loss_of(const py::dict& settings) {
    sk::LossParams loss;
    loss.kind = static_cast<sk::LossKind>(settings["kind"].cast<int>());
    loss.label_smoothing = settings["label_smoothing"].cast<double>();
    loss.gamma_pos = settings["gamma_pos"].cast<double>(), loss.gamma_neg = settings["gamma_neg"].cast<double>();
    loss.alpha_pos = settings["alpha_pos"].cast<double>(), loss.alpha_neg = settings["alpha_neg"].cast<double>();
    loss.clip = settings["clip"].cast<double>(), loss.eps = settings["eps"].cast<double>();
    loss.detach_focus = settings["detach_focus"].cast<bool>();
    return loss;
}

struct Launch {  // what every operation starts with
    sk::LaunchOn on;
    sk::Problem problem;
};

Launch launch_of(int device, Address stream, const std::string& dtype, Address x, Address weight, Address c, Address u,
                 Address bias, int64_t batch, int64_t labels, int64_t slack, int64_t rank) {
    if (batch < 0 || labels < 0 || slack < 0 || rank < 0 || slack > INT32_MAX / 2 || rank > INT32_MAX / 8)
        throw py::value_error("batch, labels, slack and rank must be sizes, and slack and rank fit 31 bits");
    return {{device, at<void>(stream)},
            {dtype_of(dtype), at<void>(x), at<void>(weight), at<void>(c), at<void>(u), at<void>(bias), batch, labels,
             slack, rank}};
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
    m.doc() = "CUDA kernels on raw device pointers; see sigkernels/backends/cuda.py for their use with torch";
    static py::exception<sk::CudaError> error(m, "CudaError", PyExc_RuntimeError);
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) std::rethrow_exception(p);
        } catch (const sk::CudaError& e) {
            py::set_error(error, e.what());
        }
    });

    py::class_<Launch>(m, "Launch")
        .def(py::init(&launch_of), py::kw_only(), py::arg("device"), py::arg("stream"), py::arg("dtype"), py::arg("x"),
             py::arg("weight"), py::arg("c"), py::arg("u"), py::arg("bias"), py::arg("batch"), py::arg("labels"),
             py::arg("slack"), py::arg("rank"));

    m.def(
        "logits",
        [](const Launch& l, Address out, int64_t out_stride) {
            const py::gil_scoped_release release;
            sk::logits(l.on, l.problem, at<void>(out), out_stride);
        },
        py::arg("launch"), py::kw_only(), py::arg("out"), py::arg("out_stride"));

    m.def(
        "fused_loss",
        [](const Launch& l, bool sparse, Address indices, Address positions, int64_t label_start, Address dense,
           int64_t dense_stride, const py::dict& loss, Address label_weight, Address pos_weight, Address row_factor,
           Address out_scale, Address row_sums, bool need_x, Address slabs, Address grad_c, Address grad_weight,
           bool grad_weight_narrow, bool accumulate_weight, Address grad_bias, bool accumulate_bias, int64_t blocks) {
            const sk::FusedLoss f{sparse,
                                  at<int64_t>(indices),
                                  at<int32_t>(positions),
                                  label_start,
                                  at<void>(dense),
                                  dense_stride,
                                  loss_of(loss),
                                  at<void>(label_weight),
                                  at<void>(pos_weight),
                                  at<void>(row_factor),
                                  at<void>(out_scale),
                                  at<double>(row_sums),
                                  need_x,
                                  at<void>(slabs),
                                  at<void>(grad_c),
                                  at<void>(grad_weight),
                                  grad_weight_narrow,
                                  accumulate_weight,
                                  at<void>(grad_bias),
                                  accumulate_bias,
                                  blocks};
            const py::gil_scoped_release release;
            sk::fused_loss(l.on, l.problem, f);
        },
        py::arg("launch"), py::kw_only(), py::arg("sparse"), py::arg("indices"), py::arg("positions"),
        py::arg("label_start"), py::arg("dense"), py::arg("dense_stride"), py::arg("loss"), py::arg("label_weight"),
        py::arg("pos_weight"), py::arg("row_factor"), py::arg("out_scale"), py::arg("row_sums"), py::arg("need_x"),
        py::arg("slabs"), py::arg("grad_c"), py::arg("grad_weight"), py::arg("grad_weight_narrow"),
        py::arg("accumulate_weight"), py::arg("grad_bias"), py::arg("accumulate_bias"), py::arg("blocks"));

    m.def(
        "topk",
        [](const Launch& l, int64_t ranges, int64_t m, Address keys, Address labels) {
            if (m < 1 || m > sk::longest_list()) throw py::value_error("m must lie in 1 ... longest_list()");
            const py::gil_scoped_release release;
            sk::topk(l.on, l.problem, ranges, m, at<void>(keys), at<int32_t>(labels));
        },
        py::arg("launch"), py::kw_only(), py::arg("ranges"), py::arg("m"), py::arg("keys"), py::arg("labels"));

    m.def(
        "predict_count",
        [](const Launch& l, int64_t ranges, double threshold, Address counts) {
            const py::gil_scoped_release release;
            sk::predict_count(l.on, l.problem, ranges, threshold, at<int32_t>(counts));
        },
        py::arg("launch"), py::kw_only(), py::arg("ranges"), py::arg("threshold"), py::arg("counts"));

    m.def(
        "predict_fill",
        [](const Launch& l, int64_t ranges, double threshold, Address starts, int64_t label_start, Address indices) {
            const py::gil_scoped_release release;
            sk::predict_fill(l.on, l.problem, ranges, threshold, at<int64_t>(starts), label_start,
                             at<int64_t>(indices));
        },
        py::arg("launch"), py::kw_only(), py::arg("ranges"), py::arg("threshold"), py::arg("starts"),
        py::arg("label_start"), py::arg("indices"));

    m.def("rows_per_group", [](const std::string& dtype) { return sk::rows_per_group(dtype_of(dtype)); });
    m.def("resident_blocks",
          [](const std::string& dtype, int device) { return sk::resident_blocks(dtype_of(dtype), device); });
    m.def("shared_memory", [](const std::string& name) {  // bytes per block of each kernel
        const sk::DType dtype = dtype_of(name);
        py::dict bytes;
        bytes["logits"] = sk::logits_shared_bytes(dtype);
        bytes["fused_loss"] = sk::fused_loss_shared_bytes(dtype);
        bytes["topk"] = sk::topk_shared_bytes(dtype);
        bytes["predict"] = sk::predict_shared_bytes(dtype);
        return bytes;
    });
    m.def("device_count", &sk::device_count);
    m.def("devices", &sk::devices);
    m.attr("TILE") = sk::tile_labels();
    m.attr("LONGEST_LIST") = sk::longest_list();
}
