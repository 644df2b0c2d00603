#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <stdexcept>

#include "cpu/gradient_memory.h"

namespace py = pybind11;

namespace sk {
namespace {

// What is used of torch.  It lives as long as the process: tensors may outlive this module.
struct Torch {
    const dlpack::Exchange* exchange;
    py::object tensor, parameter, get_num_threads;
    py::object dtypes[5];  // by Dtype
    py::str is_neg{"is_neg"}, requires_grad{"requires_grad"}, untyped_storage{"untyped_storage"}, data_ptr{"data_ptr"},
        nbytes{"nbytes"};
};
const Torch* torch = nullptr;

PyTypeObject* type_of(const py::object& type) { return reinterpret_cast<PyTypeObject*>(type.ptr()); }

bool is_true(PyObject* owned) {
    if (!owned) throw py::error_already_set();
    const bool yes = owned == Py_True;
    Py_DECREF(owned);
    return yes;
}

// A tensor's memory: this, and the numbers behind it.
struct alignas(64) Block {
    dlpack::ManagedTensor managed;
    int64_t shape[2], strides[2];
    size_t bytes;  // of all of it
};

void release(dlpack::ManagedTensor* managed) {
    auto* block = static_cast<Block*>(managed->context);
    gradient_memory().give_back(block, block->bytes);
}

dlpack::DataType data_type(Dtype dtype) {
    switch (dtype) {
        case Dtype::f32: return {dlpack::kFloat, 32, 1};
        case Dtype::f64: return {dlpack::kFloat, 64, 1};
        case Dtype::bf16: return {dlpack::kBfloat, 16, 1};
        case Dtype::f16: return {dlpack::kFloat, 16, 1};
        case Dtype::u8: return {dlpack::kUInt, 8, 1};
    }
    throw std::invalid_argument("no such dtype");
}
constexpr dlpack::DataType kInt64{dlpack::kInt, 64, 1};

NewTensor new_tensor(int ndim, int64_t rows, int64_t columns, dlpack::DataType type) {
    const int64_t most = (std::numeric_limits<int64_t>::max() - int64_t{sizeof(Block)}) / (type.bits / 8);
    if (rows < 0 || columns < 0 || (columns && rows > most / columns)) throw std::length_error("a tensor of such sizes");
    const size_t bytes = sizeof(Block) + static_cast<size_t>(rows * columns) * (type.bits / 8);
    auto* block = new (gradient_memory().take(bytes)) Block;
    block->bytes = bytes;
    block->shape[0] = rows, block->shape[1] = columns;
    block->strides[0] = columns, block->strides[1] = 1;
    block->managed = {{1, 0}, block, release, 0, {block + 1, {dlpack::kCpu, 0}, ndim, type, block->shape, block->strides, 0}};
    void* object = nullptr;
    if (torch->exchange->object_from_managed(&block->managed, &object)) throw py::error_already_set();
    return {py::reinterpret_steal<py::object>(static_cast<PyObject*>(object)), block + 1};
}

}  // namespace

void use_torch(const py::module_& module) {
    const py::object type = module.attr("Tensor"), table = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    const void* found = table.is_none() ? nullptr : PyCapsule_GetPointer(table.ptr(), dlpack::kExchange);
    if (PyErr_Occurred()) throw py::error_already_set();
    const auto* given = static_cast<const dlpack::Exchange*>(found);
    if (!given || given->header.version.major != 1 || !given->borrow)
        throw py::import_error("this torch exchanges no tensors by version 1 of DLPack's function table");
    torch = new Torch{given, type, module.attr("nn").attr("Parameter"), module.attr("get_num_threads"),
                      {module.attr("float32"), module.attr("float64"), module.attr("bfloat16"), module.attr("float16"),
                       module.attr("uint8")}};
}

int torch_threads() { return torch->get_num_threads().cast<int>(); }

bool is_plain_tensor(py::handle object) {
    return Py_TYPE(object.ptr()) == type_of(torch->tensor) || Py_TYPE(object.ptr()) == type_of(torch->parameter);
}

bool requires_grad(py::handle tensor) { return is_true(PyObject_GetAttr(tensor.ptr(), torch->requires_grad.ptr())); }

// ---- reading ----

namespace {

void forget_exception() {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();  // such as KeyboardInterrupt
    PyErr_Clear();
}

// What a method returns; null where it raises.
py::object call(const py::object& object, const py::str& method) {
    PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), method.ptr());
    if (!result) forget_exception();
    return py::reinterpret_steal<py::object>(result);
}

// Whether all elements of a tensor are inside of its storage, which may have been resized since the tensor was made.
bool is_inside(const dlpack::Tensor& tensor, const void* data, const void* storage, size_t bytes) {
    size_t last = 0;
    for (int i = 0; i < tensor.ndim; ++i) {
        if (!tensor.shape[i]) return true;
        last += static_cast<size_t>(tensor.shape[i] - 1) * static_cast<size_t>(tensor.strides[i]);
    }
    const size_t first = reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(storage);  // huge if in front of it
    return first <= bytes && last < (bytes - first) / (tensor.dtype.bits / 8);
}

}  // namespace

bool Array::read() {
    // A tensor does not keep its memory: `tensor.data = other` in another thread lets it go while a kernel reads.
    storage_ = call(object_, torch->untyped_storage);
    if (!storage_) return false;
    const py::object start = call(storage_, torch->data_ptr), bytes = call(storage_, torch->nbytes);
    if (!start || !bytes || !PyLong_Check(start.ptr()) || !PyLong_Check(bytes.ptr())) return false;
    dlpack::Tensor tensor;
    if (torch->exchange->borrow(object_.ptr(), &tensor)) {
        forget_exception();
        return false;
    }
    if (tensor.device.type != dlpack::kCpu || (tensor.ndim && !tensor.strides)) return false;
    if (!set_dtype(tensor.dtype)) return false;
    data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
    ndim_ = tensor.ndim;
    for (int i = 0; i < std::min(ndim_, 2); ++i) shape_[i] = tensor.shape[i], strides_[i] = tensor.strides[i];
    return is_inside(tensor, data_, PyLong_AsVoidPtr(start.ptr()), PyLong_AsSize_t(bytes.ptr()));
}

bool Array::set_dtype(dlpack::DataType type) {
    const auto found = [&](Dtype dtype) {
        dtype_ = dtype;
        kind_ = Kind::number;
        return true;
    };
    kind_ = Kind::other;
    if (type.code == dlpack::kFloat && type.bits == 32) return found(Dtype::f32);
    if (type.code == dlpack::kFloat && type.bits == 64) return found(Dtype::f64);
    if (type.code == dlpack::kBfloat && type.bits == 16) return found(Dtype::bf16);
    if (type.code == dlpack::kFloat && type.bits == 16) return found(Dtype::f16);
    if ((type.code == dlpack::kUInt || type.code == dlpack::kBool) && type.bits == 8) return found(Dtype::u8);
    if (type.code == dlpack::kInt && type.bits == 64) kind_ = Kind::int64;
    return kind_ == Kind::int64;
}

bool Array::hold(py::handle tensor) {
    if (!is_plain_tensor(tensor) && !py::isinstance(tensor, torch->tensor)) return false;
    // A lazily negated tensor, such as the imaginary part of a conjugate, has its numbers in memory with the other sign.
    object_ = is_true(PyObject_CallMethodNoArgs(tensor.ptr(), torch->is_neg.ptr()))
                  ? tensor.attr("resolve_neg")()
                  : py::reinterpret_borrow<py::object>(tensor);
    return read();
}

bool Array::hold_matrix(py::handle tensor) {
    if (!hold(tensor) || ndim() != 2) return false;
    if (stride(1) == 1 || size(1) <= 1) return true;
    object_ = object_.attr("detach")().attr("contiguous")();
    return read();
}

bool Array::hold_vector(py::handle tensor) {
    if (!hold(tensor) || ndim() != 1) return false;
    if (stride(0) == 1 || size(0) <= 1) return true;
    object_ = object_.attr("detach")().attr("contiguous")();
    return read();
}

bool Array::convert(Dtype dtype) {
    if (is(dtype)) return true;
    if (!is_number()) return false;
    object_ = cast(object_.attr("detach")(), dtype);
    return read();
}

bool Array::is(Dtype dtype) const { return kind_ == Kind::number && dtype_ == dtype; }
bool Array::is_int64() const { return kind_ == Kind::int64; }
bool Array::is_number() const { return kind_ == Kind::number; }

// ---- making ----

NewTensor new_matrix(int64_t rows, int64_t columns, Dtype dtype) { return new_tensor(2, rows, columns, data_type(dtype)); }
NewTensor new_int64_matrix(int64_t rows, int64_t columns) { return new_tensor(2, rows, columns, kInt64); }

NewTensor new_vector(int64_t count, Dtype dtype) { return new_tensor(1, count, 1, data_type(dtype)); }
NewTensor new_int64_vector(int64_t count) { return new_tensor(1, count, 1, kInt64); }

py::object new_number(double value, Dtype dtype) {
    const NewTensor made = new_tensor(0, 1, 1, data_type(dtype));
    if (dtype == Dtype::f64) {
        *static_cast<double*>(made.data) = value;
    } else {
        const bool beyond = std::abs(value) > std::numeric_limits<float>::max();
        *static_cast<float*>(made.data) =
            beyond ? std::copysign(std::numeric_limits<float>::infinity(), static_cast<float>(value > 0 ? 1 : -1))
                   : static_cast<float>(value);
    }
    return made.object;
}

py::object cast(const py::object& tensor, Dtype dtype) {
    return tensor.attr("to")(torch->dtypes[static_cast<int>(dtype)]);
}

}  // namespace sk
