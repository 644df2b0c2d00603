// torch's tensors, read and made through the function table that DLPack defines: one crossing from Python, and no header of
// torch.  All of it needs the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include "cpu/job.h"
#include "dlpack.h"

namespace sk {

// The module torch, whose tensors these are.  Throws import_error where they have no such table.
void use_torch(const pybind11::module_& torch);

// torch.get_num_threads()
int torch_threads();

// Whether it is a torch.Tensor or torch.nn.Parameter itself, not of a class derived from them.
bool is_plain_tensor(pybind11::handle object);

// tensor.requires_grad
bool requires_grad(pybind11::handle tensor);

// The memory of a tensor, which lives as long as this, also where another thread gives the tensor another memory.
class Array {
  public:
    // False where a kernel can read nothing: it is no tensor, on another device, of another layout, or its memory is gone or
    // too small.
    bool hold(pybind11::handle tensor);
    // The same for a matrix whose rows are contiguous, or for a contiguous vector: a copy where they are not.
    bool hold_matrix(pybind11::handle tensor);
    bool hold_vector(pybind11::handle tensor);
    // The numbers in another dtype: a copy where they have another.
    bool convert(Dtype dtype);

    bool is_of(pybind11::handle tensor) const { return object_.is(tensor); }  // and not a copy
    bool is(Dtype dtype) const;
    bool is_int64() const;
    bool is_number() const;  // it has a dtype: of a kind that kernels compute with, or bytes
    Dtype dtype() const { return dtype_; }
    int ndim() const { return ndim_; }
    // Of the first two dimensions
    int64_t size(int dim) const { return shape_[dim]; }
    int64_t stride(int dim) const { return strides_[dim]; }
    template <class T = void>
    T* data() const {
        return reinterpret_cast<T*>(data_);
    }

  private:
    enum class Kind : uint8_t { other, number, int64 };

    bool read();
    bool set_dtype(dlpack::DataType type);

    pybind11::object object_, storage_;
    char* data_ = nullptr;
    int ndim_ = 0;
    int64_t shape_[2]{}, strides_[2]{};
    Kind kind_ = Kind::other;
    Dtype dtype_ = Dtype::f32;
};

// A tensor that was made here, and where its numbers go.
struct NewTensor {
    pybind11::object object;
    void* data;
};

// Uninitialised, on memory that an earlier one has left behind where it is large.
NewTensor new_matrix(int64_t rows, int64_t columns, Dtype dtype);
NewTensor new_vector(int64_t count, Dtype dtype);
NewTensor new_int64_matrix(int64_t rows, int64_t columns);
NewTensor new_int64_vector(int64_t count);

// A number as a tensor [], in float32 or float64; infinite where it is beyond the range of float32.
pybind11::object new_number(double value, Dtype dtype);

// tensor.to(dtype)
pybind11::object cast(const pybind11::object& tensor, Dtype dtype);

}  // namespace sk
