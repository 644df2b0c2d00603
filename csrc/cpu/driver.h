// Everything around the tile loop that is compiled once: which instruction set, memory, chunks of rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/job.h"

namespace sk {

// The instruction sets in this build, best first, those for tests last; `usable` says whether this CPU has it.
struct Isa {
    const char* name;
    const Kernels* kernels;
    bool usable;
    const Kernels* pairs = nullptr;   // for losses of bfloat16, where the CPU multiplies pairs of them (dot2.h)
    const Kernels* narrow = nullptr;  // for batches that one vector holds
};
const std::vector<Isa>& isas();

// What the environment variable SIGKERNELS_ISA says now, or "".
std::string forced_isa();

// The instruction set named `name`, or the best usable one for "".  Throws std::invalid_argument with the remedy.
const Isa& choose_isa(const std::string& name);

// The kernels of that instruction set for a job.
const Kernels& kernels_for(const std::string& name, const Job& job);

// Throws std::invalid_argument: what is wrong with sparse targets, and the remedy.
[[noreturn]] void refuse_targets(const std::string& what);

// Label sets found by predict, row by row.
struct Found {
    std::vector<Hits> lists;  // one per share and chunk, in order of labels within a chunk
    std::vector<int64_t> first_row;
    int64_t total = 0;
    Found() = default;
    Found(const Found&) = delete;
    Found& operator=(const Found&) = delete;
    ~Found();
    void write(int64_t rows, int64_t* offsets, int64_t* indices) const;
};

// Runs the job over all its rows, `chunk` rows at a time.  topk: `top_values` [rows, keep] of dtype, `top_labels`.
struct Outputs {
    void* top_values = nullptr;
    int64_t* top_labels = nullptr;
    Found* found = nullptr;
};
// Throws std::invalid_argument where sparse targets are no sets of labels of the layer; nothing is written then.
void run_job(const Kernels& kernels, Job job, int64_t chunk, const Outputs& outputs);

}  // namespace sk
