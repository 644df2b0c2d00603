// The part of DLPack 1 (https://dmlc.github.io/dlpack) by which a Python module in C exchanges tensors with the library
// they come from: structs whose layout is fixed, so that no header of that library is needed.
#pragma once

#include <cstdint>

namespace dlpack {

struct Version {
    uint32_t major, minor;
};

struct Device {
    int32_t type, id;
};
constexpr int32_t kCpu = 1;

struct DataType {
    uint8_t code, bits;
    uint16_t lanes;
};
enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};

struct ManagedTensor {
    Version version;
    void* context;
    void (*deleter)(ManagedTensor*);
    uint64_t flags;
    Tensor tensor;
};

// What a tensor type has as __dlpack_c_exchange_api__, a capsule of this name.
constexpr const char* kExchange = "dlpack_exchange_api";
struct ExchangeHeader {
    Version version;
    ExchangeHeader* older;
};
struct Exchange {
    ExchangeHeader header;
    int (*allocate)(Tensor* like, ManagedTensor** out, void* error, void (*set_error)(void*, const char*, const char*));
    int (*managed_from_object)(void* object, ManagedTensor** out);
    int (*object_from_managed)(ManagedTensor* managed, void** out);  // takes `managed` over
    int (*borrow)(void* object, Tensor* out);                        // as long as the object lives
    int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace dlpack
