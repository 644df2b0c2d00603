// Number types, and how a warp multiplies matrices of them that lie in shared memory.
//
// A product advances in steps of 32 bytes: 16 numbers of 16 bits, or 8 floats that the tensor cores read as tf32. Rows in
// shared memory are an odd number of 16 bytes apart, so that eight of them lie in different banks.
#pragma once

#include "warp.cuh"

namespace sk {

constexpr int STEP_BYTES = 32;
constexpr int PAD = 16;  // bytes behind the steps of a row

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(double v) { return static_cast<float>(v); }
__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ __forceinline__ T narrow(float v);
template <>
__device__ __forceinline__ float narrow(float v) { return v; }
template <>
__device__ __forceinline__ __half narrow(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }

// The same for a number that the tensor cores read: to the nearest tf32, of which they would cut digits off.
template <class T>
__device__ __forceinline__ T operand(float v) { return narrow<T>(v); }
template <>
__device__ __forceinline__ float operand(float v) { return __int_as_float(int(round_tf32(v))); }

using Left = uint32_t[4];      // 16 rows, one step
using Right = uint32_t[2][2];  // one step, two times 8 columns
using Sum = float[4];          // 16 rows, 8 columns: see multiply

// 16 rows from `at`, `stride` bytes apart.
__device__ __forceinline__ void load_left(Left& left, const unsigned char* at, int stride) {
    load_matrices(left, at + lane() % 16 * stride + lane() / 16 * 16);
}
// 16 columns of a product, each of which is a row from `at`.
__device__ __forceinline__ void load_right(Right& right, const unsigned char* at, int stride) {
    uint32_t four[4];
    load_matrices(four, at + (lane() % 8 + lane() / 16 * 8) * stride + lane() / 8 % 2 * 16);
    right[0][0] = four[0], right[0][1] = four[1], right[1][0] = four[2], right[1][1] = four[3];
}

// What depends on the type: operands whose steps go down the rows of a matrix, or come from a sum.
template <class T>
struct Kind {
    using Scalar = T;
    static constexpr int DEPTH = STEP_BYTES / sizeof(T);

    // left [16 columns, DEPTH rows] of the matrix at `at`
    static __device__ __forceinline__ void left_of_columns(Left& left, const unsigned char* at, int stride) {
        load_transposed(left, at + (lane() % 8 + lane() / 16 * 8) * stride + lane() / 8 % 2 * 16);
    }
    // right [DEPTH rows, 16 columns]
    static __device__ __forceinline__ void right_of_rows(Right& right, const unsigned char* at, int stride) {
        uint32_t four[4];
        load_transposed(four, at + lane() % 16 * stride + lane() / 16 * 16);
        right[0][0] = four[0], right[0][1] = four[1], right[1][0] = four[2], right[1][1] = four[3];
    }
    // left [16 rows, DEPTH columns] from the sums of as many columns
    static __device__ __forceinline__ void left_of_sums(Left& left, const Sum* sums) {
        left[0] = pack(sums[0][0], sums[0][1], T{}), left[1] = pack(sums[0][2], sums[0][3], T{});
        left[2] = pack(sums[1][0], sums[1][1], T{}), left[3] = pack(sums[1][2], sums[1][3], T{});
    }
    // The same left operand as a matrix of 16 rows.
    static __device__ __forceinline__ void store(const Left& left, unsigned char* at, int stride) {
        unsigned char* to = at + lane() / 4 * stride + lane() % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = left[0];
        *reinterpret_cast<uint32_t*>(to + 8 * stride) = left[1];
        *reinterpret_cast<uint32_t*>(to + 16) = left[2];
        *reinterpret_cast<uint32_t*>(to + 8 * stride + 16) = left[3];
    }
};

// tf32: the tensor cores want columns l and l + 4 in lane l, and a sum has 2 l and 2 l + 1 there. The order within a step
// is free as long as both operands have the same: all operands here take row 2 l for l and 2 l + 1 for l + 4.
template <>
struct Kind<float> {
    using Scalar = float;
    static constexpr int DEPTH = STEP_BYTES / sizeof(float);

    static __device__ __forceinline__ uint32_t word(const unsigned char* at, int stride, int row, int column) {
        return *reinterpret_cast<const uint32_t*>(at + row * stride + column * 4);
    }
    static __device__ __forceinline__ void left_of_columns(Left& left, const unsigned char* at, int stride) {
        const int row = lane() % 4 * 2, column = lane() / 4;
        left[0] = word(at, stride, row, column), left[1] = word(at, stride, row, column + 8);
        left[2] = word(at, stride, row + 1, column), left[3] = word(at, stride, row + 1, column + 8);
    }
    static __device__ __forceinline__ void right_of_rows(Right& right, const unsigned char* at, int stride) {
        const int row = lane() % 4 * 2, column = lane() / 4;
        right[0][0] = word(at, stride, row, column), right[0][1] = word(at, stride, row + 1, column);
        right[1][0] = word(at, stride, row, column + 8), right[1][1] = word(at, stride, row + 1, column + 8);
    }
    static __device__ __forceinline__ void left_of_sums(Left& left, const Sum* sums) {
        left[0] = round_tf32(sums[0][0]), left[1] = round_tf32(sums[0][2]);
        left[2] = round_tf32(sums[0][1]), left[3] = round_tf32(sums[0][3]);
    }
    static __device__ __forceinline__ void store(const Left& left, unsigned char* at, int stride) {
        auto* to = reinterpret_cast<uint2*>(at + lane() / 4 * stride + lane() % 4 * 8);
        auto* below = reinterpret_cast<uint2*>(at + (lane() / 4 + 8) * stride + lane() % 4 * 8);
        *to = {left[0], left[2]}, *below = {left[1], left[3]};
    }
};

}  // namespace sk
