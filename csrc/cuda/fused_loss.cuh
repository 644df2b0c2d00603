// The fused pass: loss of every row, and the gradients of x, weight and bias, without a [batch, labels] array.
//
// Block b owns labels block_labels · b and following, and takes the rows in groups. Per group, tile of labels and warp, in
// registers: z = [x | coef] [weight | basis]^T, the loss, ∂loss/∂z = g, and g [weight | basis], added up over the range. g
// also goes to shared memory, from which all warps make g^T x, which is written at once, or added to what earlier groups
// left: no other block has these labels. No atomics: every sum has one owner and a fixed order. The next tile of weight
// arrives meanwhile.
#pragma once

#include "elementwise.cuh"
#include "waves.cuh"

namespace sk {
namespace {  // as what it has of core/losses.h

template <class T>
struct FusedLossArgs {
    const T* x;       // [batch, slack], rows x_stride numbers apart
    const T* weight;  // [labels, slack]
    const T* bias;    // [labels] or null
    const T* basis;   // [block_labels, 16] or null: lies beside weight, from column `basis_at` on
    const T* coef;    // [batch, blocks, 16] or null: the kernel makes them, of the `features` numbers before x in its rows
    const T* waves;   // [blocks, wave_steps, 32 lanes, 2, 2]: right operands; or null
    int64_t x_stride;
    int batch, labels, slack, block_labels, features, wave_steps;
    // Where slack leaves room in the last 16 columns of S::COLUMNS, the number there, a multiple of 4, from which on basis and
    // coef are no zeros and take the place; else, and without a basis, S::COLUMNS: they have 16 columns of their own.
    int basis_at;
    int weight_piece;  // bytes: the longest copies that weight is aligned to
    int x_moves;       // rows of x do not begin at multiples of 16 bytes
    LossArgs loss;
    const float* row_factor;  // [batch] or null: multiplies ∂loss/∂z
    const float* out_scale;   // [1] or null: multiplies grad_weight and grad_bias, as scale does
    float scale;
    int wide, accumulate;  // grad_weight and grad_bias are float, else T; they are added to (float only)
    int pairs;             // grad_weight can be written two numbers at a time
    void* grad_weight;     // [labels, slack] or null
    void* grad_bias;       // [labels] or null
    // Sums over groups of rows; null where there is one group, or the gradients are float.
    float* weight_sums;    // [labels, slack]
    float* bias_sums;      // [labels]
    T* grad_coef;          // or null: see WavesArgs
    int numbers;           // of a block's coefficients of a row that are waves': 8 or 16
    float* slabs;          // [blocks, batch, slack] or null; where there is grad_coef, with a column more: the constant's
    float* row_sums;       // [blocks, batch]
    double* totals;        // [blocks]: row_sums summed over the rows
};

template <class S>
struct FusedLoss {
    using T = typename S::Scalar;
    using K = Kind<T>;
    static constexpr int M = S::ROW_TILES, CHUNK = S::CHUNK, SUMS = CHUNK / 8;

    const FusedLossArgs<T>& p;
    unsigned char* const shared;
    const int base, rows;   // of this group: its first row, and how many
    const int row0;         // of this warp: its first row in the group
    const int first, last;  // labels of this block
    Sum grad_x[M][S::COLUMNS / 8] = {}, grad_coef[M][2] = {};
    Left coef[M][S::RANK_STEPS] = {};
    Left x[S::HOLDS_X ? M : 1][S::HOLDS_X ? S::STEPS : 1];  // else it is read from shared memory for every chunk
    RowLosses<M> losses;

    __device__ __forceinline__ FusedLoss(const FusedLossArgs<T>& args, unsigned char* memory, int group_row)
        : p(args), shared(memory), base(group_row), rows(min(S::ROWS, p.batch - base)),
          row0(thread() / 32 / S::LABEL_WARPS * S::WARP_ROWS), first(int(blockIdx.x) * p.block_labels),
          last(min(first + p.block_labels, p.labels)) {}

    // The place of this warp among those with the same rows.
    static __device__ __forceinline__ int label_warp() { return thread() / 32 % S::LABEL_WARPS; }

    __device__ __forceinline__ unsigned char* w(int buffer) const { return shared + S::AT_W + buffer * S::W_BYTES; }
    __device__ __forceinline__ unsigned char* g() const { return shared + S::AT_G; }
    __device__ __forceinline__ float* bias(int buffer) const {
        return reinterpret_cast<float*>(shared + S::AT_BIAS) + buffer * S::TILE;
    }

    // Whether basis and coef lie in columns that slack leaves.
    __device__ __forceinline__ bool packed() const { return p.basis_at < S::COLUMNS; }
    __device__ __forceinline__ bool apart() const { return p.basis && !packed(); }

    // Begins to bring a tile of weight and basis. FILL: into memory that has no zeros, where rows or columns are missing.
    template <bool FILL>
    __device__ __forceinline__ void fetch(int label, int buffer) const {
        const int rows = min(S::TILE, last - label), bytes = p.slack * int(sizeof(T)), end = p.basis_at * int(sizeof(T));
        copy_rows<S::STEPS * STEP_BYTES, S::TILE, FILL>(w(buffer), S::W_STRIDE, p.weight + int64_t(label) * p.slack, bytes, rows,
                                                  bytes, end, p.weight_piece);
        constexpr int BASIS = RANK * int(sizeof(T));
        const int skip = packed() ? p.basis_at - (S::COLUMNS - RANK) : 0, left = BASIS - skip * int(sizeof(T));
        if (p.basis)
            copy_rows<4 * int(sizeof(T)), BASIS, S::TILE, FILL>(
                w(buffer) + end, S::W_STRIDE,
                reinterpret_cast<const unsigned char*>(p.basis + int64_t(label - first) * RANK + skip), BASIS, rows, left, left);
    }

    __device__ __forceinline__ const unsigned char* x_row(int row) const {
        return reinterpret_cast<const unsigned char*>(p.x + (base + row) * p.x_stride);
    }

    // Begins to bring x and the first tile; nothing but zeros beyond the rows and the slack columns.
    __device__ __forceinline__ void begin() {
        copy_raw<S::X_STRIDE, S::ROWS>(shared, x_row(0), p.x_stride * int64_t(sizeof(T)), rows, p.slack * int(sizeof(T)));
        fetch<true>(first, 0);
        if (S::FEATURES && p.waves) begin_coef();
        else clear_next();
    }

    // Zeros to the memory of the second tile, if there is one.
    __device__ __forceinline__ void clear_next() const {
        if (first + S::TILE < last)
#pragma unroll 1
            for (int at = thread(); at < S::W_BYTES / 16; at += THREADS) reinterpret_cast<uint4*>(w(1))[at] = uint4{};
    }

    // Defined in coefficients.cuh.
    __device__ __forceinline__ void load_coef();
    __device__ __forceinline__ void begin_coef() const;
    __device__ __forceinline__ void make_coef();
    __device__ __forceinline__ void pack_coef();
    // Defined in sums.cuh.
    __device__ __forceinline__ void write_sums();

    // x, which has been brought as it lies in memory, to where its rows begin; tf32 to the nearest, since the tensor cores would
    // cut digits off.
    __device__ __forceinline__ void align_x() const {
        constexpr int WORDS = S::STEPS * 8 / 32, MANY = S::HOLDS_X ? 4 : 2;  // of a lane in a row; rows of a warp at a time
#pragma unroll 1
        for (int row = thread() / 32 * MANY; row < S::ROWS; row += WARPS * MANY) {
            uint32_t words[MANY][WORDS];
#pragma unroll
            for (int r = 0; r < MANY; ++r) {
                const unsigned char* from = shared + (row + r) * S::X_STRIDE + misaligned(x_row(min(row + r, rows - 1)));
#pragma unroll
                for (int i = 0; i < WORDS; ++i) {
                    const unsigned char* at = from + (32 * i + lane()) * 4;
                    if constexpr (sizeof(T) == 4) words[r][i] = round_tf32(*reinterpret_cast<const float*>(at));
                    else words[r][i] = reinterpret_cast<const uint16_t*>(at)[0] | uint32_t(reinterpret_cast<const uint16_t*>(at)[1]) << 16;
                }
            }
            __syncwarp();  // all have read before any writes
#pragma unroll
            for (int r = 0; r < MANY; ++r)
#pragma unroll
                for (int i = 0; i < WORDS; ++i)
                    *reinterpret_cast<uint32_t*>(shared + (row + r) * S::X_STRIDE + (32 * i + lane()) * 4) = words[r][i];
        }
    }

    // x, which has been brought, into this warp's operands.
    __device__ __forceinline__ void load_x() {
        wait_for_copies();
        __syncthreads();
        if (sizeof(T) == 4 || p.x_moves) {
            align_x();
            __syncthreads();
        }
        if (S::HOLDS_X) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int step = 0; step < S::STEPS; ++step) load_x(x[S::HOLDS_X ? m : 0][S::HOLDS_X ? step : 0], m, step);
        }
    }

    __device__ __forceinline__ void load_x(Left& to, int m, int step) const {
        load_left(to, shared + (row0 + 16 * m) * S::X_STRIDE + step * STEP_BYTES, S::X_STRIDE);
    }

    // z += left times a step of the tile's rows
    __device__ __forceinline__ void add_logits(Sum (&z)[M][SUMS], const Left* const (&left)[M],
                                               const unsigned char* from) const {
#pragma unroll
        for (int pair = 0; pair < SUMS / 2; ++pair) {
            Right right;
            load_right(right, from + 16 * pair * S::W_STRIDE, S::W_STRIDE);
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) multiply(z[m][2 * pair + j], *left[m], right[j], T{});
        }
    }

    // One chunk of labels: logits, loss, g into shared memory, and its part of grad_x.
    __device__ __forceinline__ void chunk(int label, int column, int buffer, Cursor& cursor) {
        const unsigned char* from = w(buffer) + column * S::W_STRIDE;
        Sum z[M][SUMS];
#pragma unroll
        for (int n = 0; n < SUMS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float start = p.bias ? bias(buffer)[column + 8 * n + lane() % 4 * 2 + i % 2] : 0.0f;
#pragma unroll
                for (int m = 0; m < M; ++m) z[m][n][i] = start;
            }
        if (apart()) {
#pragma unroll
            for (int step = 0; step < S::RANK_STEPS; ++step) {
                const Left* left[M];
#pragma unroll
                for (int m = 0; m < M; ++m) left[m] = &coef[m][step];
                add_logits(z, left, from + (S::STEPS + step) * STEP_BYTES);
            }
        }
#pragma unroll
        for (int step = 0; step < S::STEPS; ++step) {
            Left loaded[M];
            const Left* left[M];
#pragma unroll
            for (int m = 0; m < M; ++m) {
                left[m] = S::HOLDS_X ? &x[S::HOLDS_X ? m : 0][S::HOLDS_X ? step : 0] : &loaded[m];
                if (!S::HOLDS_X) load_x(loaded[m], m, step);
            }
            add_logits(z, left, from + step * STEP_BYTES);
        }

        uint32_t bits = cursor.bits(label, CHUNK);
        if (label + CHUNK > last) {
            bits &= (1u << (last - label)) - 1;
#pragma unroll
            for (int n = 0; n < SUMS; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (label + 8 * n + lane() % 4 * 2 + i % 2 >= last)
#pragma unroll
                        for (int m = 0; m < M; ++m) z[m][n][i] = NEUTRAL;
        }
        if (p.loss.plain) plain_bce(z, bits, losses);
        else any_loss(p.loss, z, bits, base + row0, label, p.batch, last, losses);
        if (p.row_factor) {
#pragma unroll
            for (int r = 0; r < 2 * M; ++r) {
                const int row = base + row0 + 8 * r + lane() / 4;
                const float factor = row < p.batch ? p.row_factor[row] : 0.0f;
#pragma unroll
                for (int j = 0; j < 2 * SUMS; ++j) z[r / 2][j / 2][r % 2 * 2 + j % 2] *= factor;
            }
        }
#pragma unroll
        for (int step = 0; step < CHUNK / S::DEPTH; ++step) {
            Left left[M];
#pragma unroll
            for (int m = 0; m < M; ++m) {
                K::left_of_sums(left[m], z[m] + step * S::DEPTH / 8);
                K::store(left[m], g() + (row0 + 16 * m) * S::G_STRIDE + (column + step * S::DEPTH) * int(sizeof(T)),
                         S::G_STRIDE);
            }
            if (!p.slabs) continue;
            const unsigned char* at = from + step * S::DEPTH * S::W_STRIDE;
#pragma unroll
            for (int c = 0; c < S::COLUMNS / 16; ++c) add_product(&grad_x[0][2 * c], S::COLUMNS / 8, left, at + c * 16 * int(sizeof(T)));
            if (apart()) add_product(&grad_coef[0][0], 2, left, at + S::STEPS * STEP_BYTES);
        }
    }

    // 16 columns: sums[m] += left[m] times rows of the tile
    __device__ __forceinline__ void add_product(Sum* sums, int next, const Left (&left)[M], const unsigned char* at) {
        Right right;
        K::right_of_rows(right, at, S::W_STRIDE);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) multiply(sums[m * next + j], left[m], right[j], T{});
    }

    // g^T x of a tile: 32 labels and PART_COLUMNS columns of it; and the sums of g over the rows. What lies in g beyond the
    // last label makes nothing but rows that are not written.
    __device__ __forceinline__ void write_gradients(int label) const {
        constexpr int N = S::PART_COLUMNS / 8;
        const int warp = thread_again() / 32, part = warp % S::PARTS * 32, column0 = warp / S::PARTS * S::PART_COLUMNS;
        if (label + part >= last) return;
        const bool sums_bias = p.grad_bias && column0 == 0;
        Sum sums[2][N] = {}, of_rows[2] = {};
#pragma unroll 2
        for (int row = 0; row < rows; row += S::DEPTH) {
            Left left[2];
#pragma unroll
            for (int m = 0; m < 2; ++m)
                K::left_of_columns(left[m], g() + row * S::G_STRIDE + (part + 16 * m) * int(sizeof(T)), S::G_STRIDE);
            if (p.grad_weight) {
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    Right right;
                    K::right_of_rows(right, shared + row * S::X_STRIDE + (column0 + 8 * n) * int(sizeof(T)), S::X_STRIDE);
#pragma unroll
                    for (int m = 0; m < 2; ++m)
#pragma unroll
                        for (int j = 0; j < 2 && n + j < N; ++j) multiply(sums[m][n + j], left[m], right[j], T{});
                }
            }
            if (sums_bias) {
                uint32_t ones[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) ones[i] = ones_of_rows(row, i);
#pragma unroll
                for (int m = 0; m < 2; ++m) multiply(of_rows[m], left[m], ones, T{});
            }
        }
        const float scale = p.out_scale ? p.scale * *p.out_scale : p.scale;
        const bool add = p.accumulate || base, done = base + rows == p.batch;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                of_rows[m][i] *= scale;
#pragma unroll
                for (int n = 0; n < N; ++n) sums[m][n][i] *= scale;
            }
        if (p.grad_weight) {
            const RowSums<T> to(p.grad_weight, p.weight_sums, p.wide, add, done);
            if (p.pairs) write_rows<2>(to, label + part, column0, sums);
            else write_rows<1>(to, label + part, column0, sums);
        }
        if (!sums_bias || lane() % 4) return;
        const RowSums<T> to(p.grad_bias, p.bias_sums, p.wide, add, done);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int at = label + part + 8 * r + lane() / 4;
            if (at >= last) continue;
            float& sum = of_rows[r / 2][r % 2 * 2];
            if (add) to.template read<1>(at, &sum);
            to.template write<1>(at, &sum);
        }
    }

    // 32 rows of grad_weight from `label` on, COUNT neighbours at a time. All numbers of a row are read before any is written.
    template <int COUNT, int N>
    __device__ __forceinline__ void write_rows(const RowSums<T>& to, int label, int column0, Sum (&sums)[2][N]) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int at = label + 8 * r + lane() / 4, column = column0 + lane() % 4 * 2;
            if (at >= last) continue;
            const int64_t place = int64_t(at) * p.slack + column;
            const auto all = [&](auto touch) {
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int i = 0; i < 2; i += COUNT)
                        if (column + 8 * n + i < p.slack) touch(place + 8 * n + i, &sums[r / 2][n][r % 2 * 2 + i]);
            };
            if (to.add) all([&](int64_t at, float* sum) { to.template read<COUNT>(at, sum); });
            all([&](int64_t at, const float* sum) { to.template write<COUNT>(at, sum); });
        }
    }

    // A right operand of ones: register i of the step that begins at `row`, zero beyond the rows.
    __device__ __forceinline__ uint32_t ones_of_rows(int row, int i) const {
        if (sizeof(T) == 4) return row + lane() % 4 * 2 + i < rows ? __float_as_int(1.0f) : 0;
        const int at = row + lane() % 4 * 2 + 8 * i;
        return pack(at < rows ? 1.0f : 0.0f, at + 1 < rows ? 1.0f : 0.0f, T{});
    }

    __device__ __forceinline__ void run() {
        const int row = row0 + lane();
        Cursor cursor(p.loss.targets, base + row, lane() < S::WARP_ROWS && row < rows);
        begin();
        // What follows waits for memory as well, while the copies are on their way.
        if (p.coef) load_coef();
        float first_bias = 0;
        if (p.bias && thread() < S::TILE && first + thread() < last) first_bias = widen(p.bias[first + thread()]);
        cursor.seek(first);
        if (thread() < S::TILE) bias(0)[thread()] = first_bias;
        load_x();
        if (S::FEATURES && p.waves) make_coef();
        if (packed()) pack_coef();
        int buffer = 0;
        for (int label = first; label < last; label += S::TILE, buffer ^= 1) {
            wait_for_copies();
            __syncthreads();  // the tile is there; g and the other tile have been read
            const int next = label + S::TILE;
            float next_bias = 0;
            if (next < last) {
                fetch<false>(next, buffer ^ 1);
                if (p.bias && thread() < S::TILE && next + thread() < last) next_bias = widen(p.bias[next + thread()]);
            }
            if (row0 < rows) {
#pragma unroll 1
                for (int column = label_warp() * CHUNK; column < S::TILE; column += S::LABEL_WARPS * CHUNK)
                    if (label + column < last) chunk(label + column, column, buffer, cursor);
            }
            if (thread() < S::TILE) bias(buffer ^ 1)[thread()] = next_bias;
            __syncthreads();
            if (p.grad_weight || p.grad_bias) write_gradients(label);
        }
        write_sums();
    }
};

template <class S>
__global__ void __launch_bounds__(THREADS, 1) fused_loss_kernel(const FusedLossArgs<typename S::Scalar> p) {
    SK_DYNAMIC_SHARED(memory);
    for (int row = 0; row < p.batch; row += S::ROWS) {
        if (row) __syncthreads();  // what lies in shared memory has been read
        FusedLoss<S>(p, memory, row).run();
    }
}

}  // namespace
}  // namespace sk

#include "coefficients.cuh"
#include "sums.cuh"
