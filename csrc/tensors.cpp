#include "tensors.h"

#include <new>
#include <stdexcept>

#include "cpu/gradient_memory.h"

namespace py = pybind11;

namespace sk {
namespace {

const dlpack::Exchange* exchange = nullptr;

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

}  // namespace

void use_tensors(py::handle type) {
    const py::object table = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    const void* found = table.is_none() ? nullptr : PyCapsule_GetPointer(table.ptr(), dlpack::kExchange);
    if (PyErr_Occurred()) throw py::error_already_set();
    const auto* given = static_cast<const dlpack::Exchange*>(found);
    if (!given || given->header.version.major != 1 || !given->borrow)
        throw py::import_error("this torch exchanges no tensors by version 1 of DLPack's function table");
    exchange = given;
}

py::object new_tensor(int64_t rows, int64_t columns, Dtype dtype) {
    const dlpack::DataType type = data_type(dtype);
    const size_t bytes = sizeof(Block) + static_cast<size_t>(rows * columns) * (type.bits / 8);
    auto* block = new (gradient_memory().take(bytes)) Block;
    block->bytes = bytes;
    block->shape[0] = rows, block->shape[1] = columns;
    block->strides[0] = columns, block->strides[1] = 1;
    block->managed = {{1, 0}, block, release, 0, {block + 1, {dlpack::kCpu, 0}, 2, type, block->shape, block->strides, 0}};
    void* object = nullptr;
    if (exchange->object_from_managed(&block->managed, &object)) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

}  // namespace sk
