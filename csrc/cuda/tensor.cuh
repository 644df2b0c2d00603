// The products of a tile on the tensor cores, through nvcuda::wmma: float16, bfloat16 and tf32 operands, float32
// sums.
//
// The 8 warps stand 4 x 2 over a result; each owns a block of 16 x 16 fragments.  A fragment's layout is the
// hardware's secret, so results leave through a 16 x 16 staging square per warp.
#pragma once

#include "types.cuh"

namespace sk {

template <class K>
struct TensorProducts {
    using Acc = float;
    using Operand = typename K::Operand;
    static constexpr int STEP = IsTf32<K>::value ? 8 : 16;  // depth of one instruction
    static constexpr int LD_STAGE = 20;                     // rows of the staging square start in different banks

    // the element type that a fragment is declared with
    template <class O, bool TF32_>
    struct FragmentType {
        using type = O;
    };
    template <class O>
    struct FragmentType<O, true> {
        using type = nvcuda::wmma::precision::tf32;
    };
    using Element = typename FragmentType<Operand, IsTf32<K>::value>::type;
    using Result = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, STEP, float>;
    template <class Layout>
    using Left = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, STEP, Element, Layout>;
    template <class Layout>
    using Right = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, STEP, Element, Layout>;
    using Rows = nvcuda::wmma::row_major;
    using Columns = nvcuda::wmma::col_major;

    template <class Fragment>
    static __device__ __forceinline__ void load(Fragment& fragment, const Operand* from, int ld) {
        nvcuda::wmma::load_matrix_sync(fragment, from, ld);
        if constexpr (IsTf32<K>::value) {
#pragma unroll
            for (int i = 0; i < fragment.num_elements; ++i)
                fragment.x[i] = nvcuda::wmma::__float_to_tf32(fragment.x[i]);
        }
    }

    // This warp's FR x FC fragments of a result, 4 x 2 warps.
    template <int FR, int FC>
    struct Block {
        Result at[FR][FC];
        int row, column;  // of the first fragment

        __device__ __forceinline__ Block() {
            const int warp = thread() / 32;
            row = warp / 2 * 16 * FR;
            column = warp % 2 * 16 * FC;
#pragma unroll
            for (int i = 0; i < FR; ++i)
#pragma unroll
                for (int j = 0; j < FC; ++j) nvcuda::wmma::fill_fragment(at[i][j], 0.0f);
        }

        // Adds left [.., depth] right [depth, ..]; (row_step, depth_step) are the strides of left, likewise of right.
        template <class LeftLayout, class RightLayout>
        __device__ __forceinline__ void add(const Operand* left, int ld_left, const Operand* right, int ld_right,
                                            int depth) {
            constexpr bool left_rows = SameLayout<LeftLayout, Rows>::value;
            constexpr bool right_rows = SameLayout<RightLayout, Rows>::value;
#pragma unroll 1
            for (int k = 0; k < depth; k += STEP) {
                Left<LeftLayout> a[FR];
                Right<RightLayout> b[FC];
#pragma unroll
                for (int i = 0; i < FR; ++i) {
                    const int r = row + 16 * i;
                    load(a[i], left + (left_rows ? r * ld_left + k : k * ld_left + r), ld_left);
                }
#pragma unroll
                for (int j = 0; j < FC; ++j) {
                    const int c = column + 16 * j;
                    load(b[j], right + (right_rows ? k * ld_right + c : c * ld_right + k), ld_right);
                }
#pragma unroll
                for (int i = 0; i < FR; ++i)
#pragma unroll
                    for (int j = 0; j < FC; ++j) nvcuda::wmma::mma_sync(at[i][j], a[i], b[j], at[i][j]);
            }
        }

        // Every element to store(row, column, value), through this warp's staging square.
        template <class Store>
        __device__ __forceinline__ void each(float* stages, Store store) {
            const int lane = thread() % 32;
            float* stage = stages + thread() / 32 * 16 * LD_STAGE;
#pragma unroll
            for (int i = 0; i < FR; ++i)
#pragma unroll
                for (int j = 0; j < FC; ++j) {
                    nvcuda::wmma::store_matrix_sync(stage, at[i][j], LD_STAGE, nvcuda::wmma::mem_row_major);
                    __syncwarp();
#pragma unroll 2
                    for (int e = lane; e < 256; e += 32)
                        store(row + 16 * i + e / 16, column + 16 * j + e % 16, stage[e / 16 * LD_STAGE + e % 16]);
                    __syncwarp();
                }
        }
    };

    template <class A, class B>
    struct SameLayout {
        static constexpr bool value = false;
    };
    template <class A>
    struct SameLayout<A, A> {
        static constexpr bool value = true;
    };

    using Sum = Block<K::ROWS / 64, TILE / 32>;

    static __device__ __forceinline__ void clear(Sum&) {}

    static __device__ __forceinline__ void logits_step(Sum& sum, const Operand* x, const Operand* w, int depth) {
        sum.template add<Rows, Columns>(x, K::LD_CHUNK, w, K::LD_CHUNK, depth);
    }

    static __device__ __forceinline__ void logits_store(const Sum& sum, Acc* z) {
#pragma unroll
        for (int i = 0; i < K::ROWS / 64; ++i)
#pragma unroll
            for (int j = 0; j < TILE / 32; ++j)
                nvcuda::wmma::store_matrix_sync(z + (sum.row + 16 * i) * K::LD_Z + sum.column + 16 * j, sum.at[i][j],
                                                K::LD_Z, nvcuda::wmma::mem_row_major);
    }

    // g [ROWS, inner] w [inner, DEPTH] -> store(row, column, value)
    template <class Store>
    static __device__ __forceinline__ void grad_x(const Operand* g, int ld, const Operand* w, int inner, Acc* stages,
                                                  Store store) {
        Block<K::ROWS / 64, K::DEPTH / 32> sum;
        sum.template add<Rows, Rows>(g, ld, w, K::LD_CHUNK, inner);
        sum.each(stages, store);
    }

    using WeightSum = Block<TILE / 64, K::DEPTH / 32>;

    // sum += g [ROWS, TILE]^T x [ROWS, DEPTH]
    static __device__ __forceinline__ void weight_step(WeightSum& sum, const Operand* g, const Operand* x) {
        sum.template add<Columns, Rows>(g, K::LD_G, x, K::LD_CHUNK, K::ROWS);
    }

    template <class Store>
    static __device__ __forceinline__ void weight_store(WeightSum& sum, Acc* stages, Store store) {
        sum.each(stages, store);
    }

    // A strip is a [ROWS, RANK] result: a warp owns 16 rows of it.
    struct Strip {
        Result at;
        __device__ __forceinline__ Strip() { nvcuda::wmma::fill_fragment(at, 0.0f); }
    };

    // strip += left [ROWS, depth] right [parts, RANK, depth]^T, summed over the parts
    static __device__ __forceinline__ void strip_step(Strip& strip, const Operand* left, const Operand* right, int ld,
                                                      int depth, int) {
        static_assert(K::ROWS == 16 * WARPS, "a warp takes 16 rows of a strip");
        const Operand* rows = left + thread() / 32 * 16 * ld;
#pragma unroll 1
        for (int k = 0; k < depth; k += STEP) {
            Left<Rows> a;
            load(a, rows + k, ld);
#pragma unroll
            for (int part = 0; part < K::FACTOR_PARTS; ++part) {
                Right<Columns> b;
                load(b, right + part * RANK * ld + k, ld);
                nvcuda::wmma::mma_sync(strip.at, a, b, strip.at);
            }
        }
    }

    template <class Store>
    static __device__ __forceinline__ void strip_store(const Strip& strip, Acc* stages, Store store) {
        const int lane = thread() % 32, warp = thread() / 32;
        float* stage = stages + warp * 16 * LD_STAGE;
        nvcuda::wmma::store_matrix_sync(stage, strip.at, LD_STAGE, nvcuda::wmma::mem_row_major);
        __syncwarp();
#pragma unroll 1
        for (int e = lane; e < 256; e += 32) store(16 * warp + e / 16, e % 16, stage[e / 16 * LD_STAGE + e % 16]);
        __syncwarp();
    }
};

}  // namespace sk
