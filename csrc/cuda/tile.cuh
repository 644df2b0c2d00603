// Matrices on their way into shared memory, and sums on their way out.
#pragma once

#include "types.cuh"

namespace sk {

constexpr int RANK = 16;  // columns of the DFT part of a block

// The shape of a block's work. A block keeps ROWS rows of x, and in the registers of its warps their gradient, while it
// walks over its labels, TILE at a time. Warp w has the w / LABEL_WARPS-th WARP_ROWS rows and every LABEL_WARPS-th chunk of
// labels.
template <class T, int STEPS_, int ROW_TILES_, int ROW_WARPS_, int TILE_>
struct Shape {
    using Scalar = T;
    static constexpr int STEPS = STEPS_;          // of the slack columns
    static constexpr int ROW_TILES = ROW_TILES_;  // 16 rows each, of a warp
    static constexpr int LABEL_WARPS = WARPS / ROW_WARPS_;
    static constexpr int TILE = TILE_;
    static constexpr int DEPTH = Kind<T>::DEPTH;
    static constexpr int WARP_ROWS = 16 * ROW_TILES;
    static constexpr int ROWS = WARP_ROWS * ROW_WARPS_;
    static constexpr int COLUMNS = STEPS * DEPTH;  // of slack; 16 more are the basis
    static constexpr int RANK_STEPS = RANK / DEPTH;
    static constexpr bool HOLDS_X = ROW_TILES * STEPS <= 8;  // in registers
    static constexpr int CHUNK = ROW_TILES * COLUMNS > 128 ? 16 : 32;  // labels that a warp has in registers
    // How the warps share a tile's grad_weight: 32 labels and so many columns each.
    static constexpr int PARTS = TILE / 32;
    static constexpr int PART_COLUMNS = COLUMNS * PARTS / WARPS;

    static constexpr int X_STRIDE = STEPS * STEP_BYTES + PAD;
    static constexpr int W_STRIDE = (STEPS + RANK_STEPS) * STEP_BYTES + PAD;
    static constexpr int G_STRIDE = TILE * int(sizeof(T)) + PAD;
    static constexpr int W_BYTES = TILE * W_STRIDE;
    // Shared memory: x [ROWS, COLUMNS], two tiles of [weight | basis], ∂loss/∂z [ROWS, TILE], two tiles of bias
    static constexpr int AT_W = ROWS * X_STRIDE;
    static constexpr int AT_G = AT_W + 2 * W_BYTES;
    // Before the first tile, behind its weights: the DFT's features of the rows, and their waves of this block as right operands
    static constexpr int FEATURE_STEPS = sizeof(T) == 2 ? 12 : 22, F_STRIDE = FEATURE_STEPS * STEP_BYTES + PAD;
    static constexpr int AT_FEATURES = AT_W + W_BYTES, AT_WAVES = AT_FEATURES + ROWS * F_STRIDE;
    static constexpr int END_OF_WAVES = AT_WAVES + FEATURE_STEPS * 512, END_OF_G = AT_G + ROWS * G_STRIDE;
    // The most features whose coefficients this block makes: none where they would take more memory than every device has.
    static constexpr int FEATURES = END_OF_WAVES <= (END_OF_G > 98 * 1024 ? END_OF_G : 98 * 1024) ? FEATURE_STEPS * DEPTH : 0;
    static constexpr int AT_BIAS = FEATURES && END_OF_WAVES > END_OF_G ? END_OF_WAVES : END_OF_G;
    static constexpr int BYTES = AT_BIAS + 2 * TILE * int(sizeof(float));
    // All of it is free at the end, when label warps meet: the sums (float4) that those of a row warp leave, of the slack
    // columns and the basis, and behind them the losses of the rows.
    static constexpr int MEETING_SUMS = (COLUMNS / 16 + 1) * (LABEL_WARPS - 1) * ROW_TILES * 2 * 32;
    static constexpr int AT_ROW_SUMS = ROW_WARPS_ * MEETING_SUMS * 16;

    static_assert(TILE % 32 == 0 && COLUMNS * PARTS % (8 * WARPS) == 0 && PARTS <= WARPS, "grad_weight is shared evenly");
    static_assert(FEATURE_STEPS % LABEL_WARPS == 0 || !FEATURES, "label warps share the steps of the features evenly");
    static_assert(WARPS * ROW_TILES * 64 * 16 <= ROWS * G_STRIDE || !FEATURES, "the shares of the coefficients fit");
    static_assert(AT_ROW_SUMS + LABEL_WARPS * ROWS * int(sizeof(float)) <= BYTES, "the meeting fits");
};

// Rows, of ROWS at the most, whose pieces of BYTES bytes are dealt out to the threads; pieces of 2 bytes are too short to
// be copied asynchronously, so several are on their way at a time. FILL: zeros for what is not there in the first `width` bytes.
template <int BYTES, int MOST, int ROWS, bool FILL>
__device__ __forceinline__ void copy_rows(unsigned char* to, int stride, const unsigned char* from, int64_t from_stride,
                                          int rows, int bytes, int width) {
    constexpr int ACROSS = MOST / BYTES, DOWN = THREADS / ACROSS;
    constexpr int PASSES = (ROWS + DOWN - 1) / DOWN, MANY = PASSES < 4 ? PASSES : 4;
    static_assert(THREADS % ACROSS == 0 && PASSES % MANY == 0, "a row has a power of two of pieces");
    const int now = thread_again(), at = now % ACROSS * BYTES, first = now / ACROSS;
    const int stop = at < bytes ? rows - first : 0, end = !FILL ? stop : at < width ? ROWS - first : 0;
    to += first * stride + at, from += first * from_stride + at;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass += MANY) {
        uint16_t pieces[MANY];
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            if ((pass + i) * DOWN >= end) continue;
            const bool there = !FILL || (pass + i) * DOWN < stop;
            if constexpr (BYTES == 2) pieces[i] = there ? *reinterpret_cast<const uint16_t*>(from + i * DOWN * from_stride) : uint16_t(0);
            else if constexpr (FILL) copy_async<BYTES>(to + i * DOWN * stride, from + i * DOWN * from_stride, there ? BYTES : 0);
            else copy_async<BYTES>(to + i * DOWN * stride, from + i * DOWN * from_stride);
        }
        if constexpr (BYTES == 2) {
#pragma unroll
            for (int i = 0; i < MANY; ++i)
                if ((pass + i) * DOWN < end) *reinterpret_cast<uint16_t*>(to + i * DOWN * stride) = pieces[i];
        }
        to += MANY * DOWN * stride, from += MANY * DOWN * from_stride;
    }
}

// Rows of `bytes` <= `width` <= MOST bytes in pieces of `piece` (16, 8, 4 or 2) bytes, which all of them and the strides are
// multiples of.
template <int MOST, int ROWS, bool FILL>
__device__ __forceinline__ void copy_rows(unsigned char* to, int stride, const void* from, int64_t from_stride, int rows,
                                          int bytes, int width, int piece) {
    const auto* source = static_cast<const unsigned char*>(from);
    if (piece == 16) copy_rows<16, MOST, ROWS, FILL>(to, stride, source, from_stride, rows, bytes, width);
    else if (piece == 8) copy_rows<8, MOST, ROWS, FILL>(to, stride, source, from_stride, rows, bytes, width);
    else if (piece == 4) copy_rows<4, MOST, ROWS, FILL>(to, stride, source, from_stride, rows, bytes, width);
    else copy_rows<2, MOST, ROWS, FILL>(to, stride, source, from_stride, rows, bytes, width);
}

// The bytes from a multiple of 16 to `at`.
__device__ __forceinline__ int misaligned(const unsigned char* at) { return int(reinterpret_cast<uintptr_t>(at) % 16); }

// Rows that begin anywhere, as they lie in 16 bytes of memory each: what precedes a row's first byte there comes along, which no
// allocation ends within.
template <int STRIDE, int ROWS>
__device__ __forceinline__ void copy_raw(unsigned char* to, const unsigned char* from, int64_t from_stride, int rows, int bytes) {
    constexpr int ACROSS = STRIDE / 16;
    int row = thread_again() / ACROSS, piece = thread_again() % ACROSS;
    from += row * from_stride;  // of that row; beyond the last nothing is read
#pragma unroll 1
    for (int at = thread_again(); at < ROWS * ACROSS; at += THREADS) {
        const int offset = misaligned(from), left = row < rows ? offset + bytes - 16 * piece : 0;
        copy_async<16>(to + at * 16, from - offset + 16 * piece, max(min(left, 16), 0));
        const bool over = piece + THREADS % ACROSS >= ACROSS;
        piece += THREADS % ACROSS - (over ? ACROSS : 0);
        row += THREADS / ACROSS + over;
        from += over ? (THREADS / ACROSS + 1) * from_stride : THREADS / ACROSS * from_stride;
    }
}

// One element of an output in its own dtype or in float32.
template <class T>
__device__ __forceinline__ void put(void* out, bool wide, int64_t at, float value) {
    if (wide) static_cast<float*>(out)[at] = value;
    else static_cast<T*>(out)[at] = narrow<T>(value);
}

// A gradient that is a sum over the rows. Groups of rows leave float sums to each other, in the gradient where it is
// float; else the last of them writes numbers of T. COUNT neighbours at a time, from a multiple of COUNT on.
template <class T>
struct RowSums {
    float* sums;
    T* numbers;  // null: sums are written
    bool add;    // to what is there

    __device__ __forceinline__ RowSums(void* gradient, float* scratch, bool wide, bool add_, bool done)
        : sums(wide ? static_cast<float*>(gradient) : scratch),
          numbers(wide || !done ? nullptr : static_cast<T*>(gradient)), add(add_) {}

    template <int COUNT>
    __device__ __forceinline__ void read(int64_t at, float* to) const {
        if (COUNT == 2) {
            const float2 before = *reinterpret_cast<const float2*>(sums + at);
            to[0] += before.x, to[1] += before.y;
        } else {
            *to += sums[at];
        }
    }
    template <int COUNT>
    __device__ __forceinline__ void write(int64_t at, const float* from) const {
        if (sizeof(T) == 4 || !numbers) {
            if (COUNT == 2) *reinterpret_cast<float2*>(sums + at) = {from[0], from[1]};
            else sums[at] = *from;
        } else {
            if (COUNT == 2) *reinterpret_cast<uint32_t*>(numbers + at) = pack(from[0], from[1], T{});
            else numbers[at] = narrow<T>(*from);
        }
    }
};

// Where warps with the same rows meet: the sums of 16 columns, of which one of them is the owner. The others leave theirs,
// as they lie in registers, and after a barrier the owner adds all in the order of the warps.
template <class S>
class Meeting {
  public:
    __device__ __forceinline__ Meeting(unsigned char* memory, int label_warp)
        : sums_(reinterpret_cast<float4*>(memory) + thread() / 32 / S::LABEL_WARPS * S::MEETING_SUMS + lane()),
          label_warp_(label_warp) {}

    // Block c of 16 columns; sums[m][first] and the next.
    template <int N>
    __device__ __forceinline__ void leave(int c, const Sum (&sums)[S::ROW_TILES][N], int first) const {
        if (label_warp_ == c % S::LABEL_WARPS) return;
        const int slot = label_warp_ - (label_warp_ > c % S::LABEL_WARPS);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const Sum& sum = sums[i / 2][first + i % 2];
            sums_[place(c, slot, i)] = {sum[0], sum[1], sum[2], sum[3]};
        }
    }

    // put(r, half, two sums), by the owner: of row 8 r + lane / 4 of the warp, column 8 half + 2 (lane % 4) and the next.
    template <int N, class Put>
    __device__ __forceinline__ void take(int c, const Sum (&sums)[S::ROW_TILES][N], int first, Put put) const {
        const int owner = c % S::LABEL_WARPS;
        if (label_warp_ != owner) return;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            float sum[4] = {};
#pragma unroll
            for (int warp = 0; warp < S::LABEL_WARPS; ++warp) {
                const Sum& own = sums[i / 2][first + i % 2];
                const float4 part =
                    warp == owner ? float4{own[0], own[1], own[2], own[3]} : sums_[place(c, warp - (warp > owner), i)];
                sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) put(i / 2 * 2 + r, i % 2, sum + 2 * r);
        }
    }

  private:
    static constexpr int TILES = 2 * S::ROW_TILES;

    static __device__ __forceinline__ int place(int c, int slot, int tile) {
        return ((c * (S::LABEL_WARPS - 1) + slot) * TILES + tile) * 32;
    }

    float4* const sums_;
    const int label_warp_;
};

// By one warp: adds the label warps' parts of `rows` rows, and the rows to `total`, or to what it has.
template <class S>
__device__ __forceinline__ void finish_rows(const float* parts, int rows, float* to, double* total, bool add) {
    double all = 0;
#pragma unroll
    for (int first = 0; first < S::ROWS; first += 32) {
        const int row = first + lane();
        if (row >= rows) continue;
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < S::LABEL_WARPS; ++warp) sum += parts[warp * S::ROWS + row];
        to[row] = sum;
        all += double(sum);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
    if (lane() == 0) *total = add ? *total + all : all;
}

}  // namespace sk
