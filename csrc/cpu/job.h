// One call of the tile loop as plain data.  No torch, no standard containers: this crosses into code that is
// compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/confusion.h"
#include "core/losses.h"
#include "core/optim.h"

namespace sk {

enum class Dtype : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3, u8 = 4 };
enum class Consumer : int { loss = 0, logits = 1, topk = 2, predict = 3 };
enum class Phase : int { pack = 0, tiles = 1, reduce = 2 };

struct Hit {
    int32_t row;
    int64_t label;
};

// A growing list of hits; `grow` doubles the room (it lives outside the ISA-specific code).
struct Hits {
    Hit* data = nullptr;
    int64_t size = 0, room = 0;
    void (*grow)(Hits*) = nullptr;
};

// Where a confusion-matrix loss finds its arrays and leaves its results.
struct ConfusionPass {
    ConfusionParams params;
    bool slopes_known = false;  // pooled sums: dloss/dS = on_y y + on_all for all labels
    double on_y = 0, on_all = 0;
    const void* betas = nullptr;  // C [m], in place of params.beta
    const void* etas = nullptr;   // C [m]
    double* sums = nullptr;       // [shares][4]: of 1 - value, tp, s, p
    double* grad_beta = nullptr;  // [m]
    double* grad_eta = nullptr;   // [m]
};

// "C" below is the type of the arithmetic: float, or double when dtype is f64.
struct Job {
    Consumer consumer = Consumer::loss;
    Dtype dtype = Dtype::f32;  // of x and weight
    int threads = 1;           // at most so many work on it
    int shares = 1;            // parts of the labels, each of which one thread does alone: a power of two
    int tile = 0;              // T: labels per tile

    // z = [W_dft | codes | weight] x + bias for the labels label_start ... label_start + labels - 1
    int64_t rows = 0;          // R: rows of this call, at most the rows a workspace was made for
    int64_t labels = 0;        // m
    int64_t slack = 0;         // s
    int64_t label_start = 0;
    int k = -1;                // -1: no DFT part
    int codes = 0;             // c: code columns; with them `tile` is 64, 128 or 256
    const uint8_t* code_bits = nullptr;  // [blocks, c / 8] from the block of label_start on: Q_a, lowest bit first
    int rank = 0, even_rank = 0;    // columns of U; those that are even around the centre of a tile
    int low_even = 0, low_odd = 0;  // rows of V for a span of tiles; 0: it has none
    const void* x = nullptr;       // [R, dft + c + s], rows x_stride apart
    int64_t x_stride = 0;
    const void* weight = nullptr;  // [m, s], rows weight_stride apart
    int64_t weight_stride = 0;
    const void* bias = nullptr;    // C [m]
    const void* u = nullptr;       // C [T, rank]
    const void* v_even = nullptr;  // C [low_even, k + 1]
    const void* v_odd = nullptr;   // C [low_odd, k]
    const void* even = nullptr;    // C [even_takers, low_even_rows], what tiles take of a span
    const void* odd = nullptr;     // C [odd_takers, low_odd_rows]
    const void* cos = nullptr;     // C [shares * most_spans, k], the rotation of each span
    const void* sin = nullptr;     // C [shares * most_spans, k]

    // loss
    LossParams loss;
    const void* label_weight = nullptr;  // C [m]
    const void* pos_weight = nullptr;    // C [m]
    const void* row_scale = nullptr;     // C [R], multiplies the gradients; without it scale_of_all does
    double scale_of_all = 1;
    const int64_t* indices = nullptr;    // sparse targets: global labels, sorted within a row
    const int64_t* offsets = nullptr;    // [R + 1]
    const uint8_t* unknown = nullptr;    // [num_indices]: 1 where the label says nothing; without it all are active
    int64_t num_indices = 0, num_labels = 0;  // what the sets were said to hold; checked before the pass
    const void* dense = nullptr;         // dense targets [R, m]
    Dtype dense_dtype = Dtype::f32;
    int64_t dense_stride = 0, dense_step = 1;  // between rows, between labels
    bool needs_x = false, needs_weight = false, needs_bias = false;
    bool accumulate = false;       // grad_weight and grad_bias hold the sums over the rows of earlier chunks
    double* row_loss = nullptr;    // [R]
    void* grad_x = nullptr;        // C [R, dft + c + s]
    void* grad_weight = nullptr;   // [m, s], rows grad_weight_stride apart
    Dtype grad_weight_dtype = Dtype::f32;
    int64_t grad_weight_stride = 0;
    void* grad_bias = nullptr;     // C [m]
    // In place of a gradient that is written: the step of an optimizer, tile by tile.  All rows are one chunk then.
    Update weight_update, bias_update;

    ConfusionPass confusion;

    // logits
    void* out = nullptr;           // [R, m] of dtype, rows out_stride apart
    int64_t out_stride = 0;

    // topk: each thread keeps the best `keep` labels of every row that it has seen as a heap
    int64_t keep = 0;
    void* heap_values = nullptr;     // C [threads, R, keep]
    int64_t* heap_labels = nullptr;  // [threads, R, keep]
    int64_t* heap_sizes = nullptr;   // [threads, R]

    // predict
    double threshold = 0;
    const void* thresholds = nullptr;  // C [m], in place of threshold
    Hits* hits = nullptr;          // [shares]

    // memory for all of it
    char* workspace = nullptr;
};

inline int64_t dft_columns(const Job& job) { return job.k >= 0 ? 2 * int64_t{job.k} + 1 : 0; }
inline int64_t x_columns(const Job& job) { return dft_columns(job) + job.codes + job.slack; }

inline bool updates(const Update& update) { return update.kind != UpdateKind::none; }

// A column of logits is needed whole, for all rows: their panels are kept until the tile is done.
inline bool whole_columns(const Job& job) {
    return job.consumer == Consumer::loss && job.loss.kind == LossKind::confusion;
}

// A share: the labels [lo, hi) and the index of its first span of tiles in the rotation tables, which have room for
// most_spans of every share.  Tiles begin at `origin` and every `tile` labels from there; lo may lie inside the first of
// them.
//
// How the labels are cut depends on the sizes of a call alone.  Whoever is free takes the next share; it has its own rows
// of grad_weight and its own sums, which are added up as a binary tree over the shares, whose number is a power of two.  So
// the bits of a result depend neither on the number of threads nor on who did what.
struct Share {
    int64_t lo, hi, first_span, origin, tile;

    int64_t skipped(int64_t at) const { return (at - origin) % tile; }  // labels of its tile before `at`
    int64_t tile_end(int64_t at) const {
        const int64_t end = at + tile - skipped(at);
        return end < hi ? end : hi;
    }
};

// Labels are cut in units: of a multiple of the usual heights of micro-kernels, or with codes of a tile, which then begins
// at a multiple of its size among all labels.
constexpr int64_t kShareUnit = 24;

inline int64_t share_unit(const Job& job) { return job.codes ? job.tile : kShareUnit; }
inline int64_t share_units(const Job& job) {
    const int64_t skipped = job.codes ? job.label_start % job.tile : 0;
    return (job.labels + skipped + share_unit(job) - 1) / share_unit(job);
}

inline int64_t most_tiles(const Job& job) {
    const int64_t most = (share_units(job) + job.shares - 1) / job.shares * share_unit(job);
    return (most + job.tile - 1) / job.tile;
}

// With a DFT part the tiles of a share are walked in spans (dft_tile.h), all of as many tiles; the last one may have fewer.
constexpr int64_t kMostOfSpan = 8;

inline int64_t most_spans(const Job& job) { return (most_tiles(job) + kMostOfSpan - 1) / kMostOfSpan; }
inline int64_t tiles_of_span(const Job& job) {
    return most_tiles(job) ? (most_tiles(job) + most_spans(job) - 1) / most_spans(job) : 1;
}

// Rows of what all tiles of a span depend on, and of what they take of it: each pair of tiles that mirror each other a row
// for each column of U, the tile in the middle its own.
inline int64_t low_even_rows(const Job& job) { return job.low_even ? job.low_even : job.k + 1; }
inline int64_t low_odd_rows(const Job& job) { return job.low_even ? job.low_odd : job.k; }
inline int64_t even_takers(const Job& job) {
    return tiles_of_span(job) / 2 * job.rank + tiles_of_span(job) % 2 * job.even_rank;
}
inline int64_t odd_takers(const Job& job) {
    return tiles_of_span(job) / 2 * job.rank + tiles_of_span(job) % 2 * (job.rank - job.even_rank);
}

inline Share share_of(const Job& job, int64_t index) {
    const int64_t unit = share_unit(job), units = share_units(job), skipped = job.codes ? job.label_start % job.tile : 0;
    const auto start = [&](int64_t i) {
        const int64_t at = i >= job.shares ? job.labels : units * i / job.shares * unit - skipped;
        return at < 0 ? 0 : at < job.labels ? at : job.labels;
    };
    return {start(index), start(index + 1), index * most_spans(job), job.codes ? -skipped : start(index), job.tile};
}

// The shares whose sums hold everything when all others are merged: what is left to Phase::reduce.
inline int64_t share_roots(const Job& job) { return job.shares > 1 ? 2 : 1; }

// What one instruction set offers.
struct Kernels {
    const char* name;
    int panel_bytes;  // of the rows that a panel holds
    size_t (*workspace_bytes)(const Job&);
    // One task of a phase: a panel of rows is packed or reduced, a share is done.
    void (*run)(const Job&, Phase, int64_t task, int thread);
    // Adds the sums of one share, and of those that were added to it, to another's.
    void (*merge)(const Job&, int64_t into, int64_t from);
};

}  // namespace sk
