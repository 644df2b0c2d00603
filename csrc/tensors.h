// torch's tensors, read and made through the function table that DLPack defines: one crossing from Python, and no header of
// torch.  All of it needs the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include "cpu/job.h"
#include "dlpack.h"

namespace sk {

// Whose tensors these are: torch.Tensor.  Throws where it has no such table.
void use_tensors(pybind11::handle type);

// An uninitialised tensor [rows, columns], on memory that an earlier one has left behind where it is large.
pybind11::object new_tensor(int64_t rows, int64_t columns, Dtype dtype);

}  // namespace sk
