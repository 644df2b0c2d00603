// Calls of the tile loop on torch's tensors.
//
// Python has checked all arguments and explains what is wrong with them.  What is checked here is what would lead the
// kernels outside of a tensor's memory: a ValueError names the tensor then.
#pragma once

#include <memory>
#include <vector>

#include "cpu/driver.h"
#include "tensors.h"

namespace sk {

// What calls of one shape share: sizes, how the labels are cut into tiles, and the arrays of the DFT plan and the codes.
class Shape {
  public:
    // `sizes`: a job with its sizes alone.
    Shape(const Job& sizes, int64_t chunk, const pybind11::object& code_bits);

    void set_plan(int rank, int even_rank, int low_even, int low_odd, const pybind11::buffer& u,
                  const pybind11::buffer& v_even, const pybind11::buffer& v_odd, const pybind11::buffer& even,
                  const pybind11::buffer& odd, const pybind11::buffer& cos, const pybind11::buffer& sin);

    // Where spans of tiles begin, counted from label_start: as many of every share, the last ones empty.
    std::vector<int64_t> span_starts() const;
    int64_t tiles_of_span() const { return sk::tiles_of_span(job_); }
    const Job& job() const { return job_; }
    int64_t chunk() const { return chunk_; }
    int64_t bytes() const { return bytes_; }  // of the arrays

  private:
    const void* keep(const char* name, const pybind11::buffer& array, int64_t itemsize, int64_t count);

    Job job_;
    int64_t chunk_, bytes_ = 0;
    std::vector<pybind11::buffer> kept_;
};

// Input and layer of a call.
struct LayerArrays {
    Array x, weight, bias;  // [R, D] and [m, s] of one dtype, [m] or nothing
    bool has_bias = false;

    bool hold(pybind11::handle x_, pybind11::handle weight_, pybind11::handle bias_);  // false where that is not so
    Dtype real() const { return x.dtype() == Dtype::f64 ? Dtype::f64 : Dtype::f32; }   // of the arithmetic
};

// Label sets in compressed rows.
struct SparseTargets {
    Array indices, offsets;  // int64 [nnz] and [R + 1]

    bool hold(pybind11::handle indices_, pybind11::handle offsets_);  // false where that is not so
};

struct Needs {
    bool x, weight, bias;
};

// Of x, weight and bias; None where nobody needs it.
struct Gradients {
    pybind11::object x = pybind11::none(), weight = pybind11::none(), bias = pybind11::none();

    // Those of bfloat16 inputs are handed out in bfloat16.
    void round_to(Dtype dtype);
};

// The step of an optimizer on a parameter and its state, which live as long as this.
class ParameterUpdate {
  public:
    // `numbers`: an update without arrays.
    ParameterUpdate(const Update& numbers, pybind11::handle parameter, pybind11::handle first, pybind11::handle second,
                    pybind11::handle compensation);

    // Whether it is about a parameter [labels, columns] of this dtype.
    bool fits(Dtype dtype, int64_t labels, int64_t columns) const;
    const Update& update() const { return update_; }

  private:
    Update update_;
    Array parameter_, first_, second_, compensation_;
};

// A shape with the tensors of a call, which live as long as this.
class Call {
  public:
    Call(std::shared_ptr<const Shape> shape, LayerArrays layer);

    void set_sparse_targets(SparseTargets targets, int64_t num_labels);
    void set_unknown(pybind11::handle unknown);  // uint8 or bool [nnz]: which of the sets' labels say nothing
    void set_dense_targets(pybind11::handle dense);
    // Makes the gradients that are needed for the job of one operation, uninitialised, in the dtype of the arithmetic; that
    // of the weight in its own where one chunk of rows writes all of it.
    Gradients new_gradients(Job& now, Needs needs) const;
    // In place of gradients that are written.
    void set_updates(const ParameterUpdate* weight, const ParameterUpdate* bias);

    // The numbers of a vector, which is held; null for None.
    template <class T = void>
    T* vector(const char* name, pybind11::handle tensor, Dtype dtype, int64_t count) {
        return static_cast<T*>(vector_of(name, tensor, dtype, count));
    }
    // `now`: a copy of this job with what is of one operation.  Throws where it is a loss without targets.
    void run(const Job& now, const Outputs& outputs = {}) const;

    Job job;     // of every operation: nothing in it may outlive what this holds
    Dtype real;  // of the arithmetic

  private:
    void* vector_of(const char* name, pybind11::handle tensor, Dtype dtype, int64_t count);

    std::shared_ptr<const Shape> shape_;
    LayerArrays layer_;
    std::vector<Array> held_;
};

}  // namespace sk
