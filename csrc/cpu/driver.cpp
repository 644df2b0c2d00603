#include "cpu/driver.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>

#include "cpu/threads.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sk {

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_narrow;
#if defined(SK_AVX512BF16)
extern const Kernels kernels_avx512bf16;
#endif
#endif
#if defined(SK_TEST_ISA)
extern const Kernels kernels_tall;
#if defined(__x86_64__)
extern const Kernels kernels_wide, kernels_pairs;
#endif
#endif

#if defined(__x86_64__)
namespace {

bool has_avx512bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

}  // namespace
#endif

const std::vector<Isa>& isas() {
    static const std::vector<Isa> all = [] {
        std::vector<Isa> found;
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        found.push_back({"avx512", &kernels_avx512, avx512});
        found.back().narrow = &kernels_avx512_narrow;
#if defined(SK_AVX512BF16)
        if (avx512 && has_avx512bf16()) found.back().pairs = &kernels_avx512bf16;
#endif
        found.push_back({"avx2", &kernels_avx2, avx2});
#endif
        found.push_back({"portable", &kernels_portable, true});
#if defined(SK_TEST_ISA)
        found.push_back({"tall", &kernels_tall, true});
#if defined(__x86_64__)
        found.push_back({"wide", &kernels_wide, avx2});
        found.push_back({"pairs", &kernels_avx2, avx2, &kernels_pairs});
#endif
#endif
        return found;
    }();
    return all;
}

std::string forced_isa() {
    const char* name = std::getenv("SIGKERNELS_ISA");
    return name ? name : "";
}

const Isa& choose_isa(const std::string& name) {
    std::string usable;
    for (const Isa& isa : isas()) {
        if (isa.usable && name.empty()) return isa;
        if (name == isa.name) {
            if (isa.usable) return isa;
            throw std::invalid_argument("SIGKERNELS_ISA=" + name + ": this CPU has no " + name +
                                        " instructions; unset SIGKERNELS_ISA to take the best it has");
        }
        if (isa.usable) usable += (usable.empty() ? "" : ", ") + std::string(isa.name);
    }
    throw std::invalid_argument("SIGKERNELS_ISA=" + name + " is not an instruction set of this build; choose one of " +
                                usable);
}

const Kernels& kernels_for(const std::string& name, const Job& job) {
    const Isa& isa = choose_isa(name);
    // Where one vector holds all rows, the second one of a panel would be empty.
    const int64_t bytes = job.rows * (job.dtype == Dtype::f64 ? 8 : 4);
    if (isa.narrow && bytes <= isa.narrow->panel_bytes) return *isa.narrow;
    const bool pairs = job.dtype == Dtype::bf16 && job.consumer == Consumer::loss && !whole_columns(job);
    return pairs && isa.pairs ? *isa.pairs : *isa.kernels;
}

// ---- sparse targets ----

void refuse_targets(const std::string& what) {
    throw std::invalid_argument("targets are not valid label sets: " + what +
                                "; build them with LabelSets(indices, offsets, num_labels), which sorts and checks, and "
                                "do not change its tensors afterwards");
}

namespace {

std::string at(const char* array, int64_t index, int64_t value) {
    return std::string(array) + "[" + std::to_string(index) + "] = " + std::to_string(value);
}

// One pass over the sets, so that no array of labels can lead the kernels outside their memory.
void check_targets(const Job& job) {
    const int64_t *offsets = job.offsets, *indices = job.indices;
    if (offsets[0] != 0) refuse_targets(at("offsets", 0, offsets[0]) + ", but the first offset is 0");
    for (int64_t row = 0; row < job.rows; ++row)
        if (offsets[row + 1] < offsets[row] || offsets[row + 1] > job.num_indices)
            refuse_targets(at("offsets", row + 1, offsets[row + 1]) + " after " + std::to_string(offsets[row]) +
                           ", but offsets never fall and none is above the number of indices, " +
                           std::to_string(job.num_indices));
    if (offsets[job.rows] != job.num_indices)
        refuse_targets("the last offset is " + std::to_string(offsets[job.rows]) + ", but there are " +
                       std::to_string(job.num_indices) + " indices");
    for (int64_t row = 0; row < job.rows; ++row) {
        int64_t before = -1;
        for (int64_t i = offsets[row]; i < offsets[row + 1]; before = indices[i++])
            if (indices[i] <= before || indices[i] >= job.num_labels)
                refuse_targets(at("indices", i, indices[i]) + " in row " + std::to_string(row) +
                               ", but the labels of a row rise from 0 or more to less than num_labels = " +
                               std::to_string(job.num_labels));
    }
}

}  // namespace

// ---- memory ----

namespace {

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<char, Free>;

Buffer allocate(size_t bytes) {
    void* p = nullptr;
#ifdef _WIN32
    p = std::malloc(bytes);
    if (!p) throw std::bad_alloc();
#else
    if (posix_memalign(&p, 4096, std::max<size_t>(bytes, 4096))) throw std::bad_alloc();
#endif
    return Buffer(static_cast<char*>(p));
}

// The workspace of the last call of this thread: fresh memory would cost a page fault every 4 KiB.
char* workspace(size_t bytes) {
    constexpr size_t kKeep = 8 << 20;
    thread_local Buffer kept;
    thread_local size_t room = 0;
    if (bytes > room || room > std::max(bytes, kKeep)) {
        kept.reset();
        room = 0;
        kept = allocate(bytes);
        room = bytes;
    }
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(kept.get(), room);  // what the parts of the last call had forbidden
#endif
    return kept.get();
}

size_t size_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::f64: return 8;
        case Dtype::f32: return 4;
        case Dtype::u8: return 1;
        default: return 2;
    }
}

template <class T>
T* shifted(T* p, int64_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return p ? reinterpret_cast<T*>(reinterpret_cast<Byte*>(p) + bytes) : nullptr;
}

// The part of the job that is about `count` rows from `first`.
Job rows_of(const Job& whole, int64_t first, int64_t count) {
    Job job = whole;
    const int64_t element = static_cast<int64_t>(size_of(whole.dtype)), real = whole.dtype == Dtype::f64 ? 8 : 4;
    job.rows = count;
    job.x = shifted(whole.x, first * whole.x_stride * element);
    job.row_scale = shifted(whole.row_scale, first * real);
    job.offsets = shifted(whole.offsets, first * 8);
    job.dense = shifted(whole.dense, first * whole.dense_stride * static_cast<int64_t>(size_of(whole.dense_dtype)));
    job.row_loss = shifted(whole.row_loss, first * 8);
    job.grad_x = shifted(whole.grad_x, first * x_columns(whole) * real);
    job.out = shifted(whole.out, first * whole.out_stride * element);
    job.accumulate = first > 0;
    return job;
}

void grow(Hits* hits) {
    const int64_t room = std::max<int64_t>(1024, hits->room * 2);
    void* moved = std::realloc(hits->data, static_cast<size_t>(room) * sizeof(Hit));
    if (!moved) throw std::bad_alloc();
    hits->data = static_cast<Hit*>(moved);
    hits->room = room;
}

// Merges the threads' heaps of each row: best first, NaN above all, ties to the lower label.
template <class C>
void merge_heaps(const Job& job, C* values, int64_t* labels) {
    struct Entry {
        C value;
        int64_t label;
        bool operator<(const Entry& other) const {
            const bool nan = value != value, other_nan = other.value != other.value;
            if (nan != other_nan) return nan;
            return value > other.value || ((value == other.value || nan) && label < other.label);
        }
    };
    std::vector<Entry> all;
    for (int64_t row = 0; row < job.rows; ++row) {
        all.clear();
        for (int t = 0; t < job.threads; ++t) {
            const int64_t slot = t * job.rows + row;
            for (int64_t i = 0; i < job.heap_sizes[slot]; ++i)
                all.push_back({static_cast<const C*>(job.heap_values)[slot * job.keep + i],
                               job.heap_labels[slot * job.keep + i]});
        }
        std::partial_sort(all.begin(), all.begin() + job.keep, all.end());
        for (int64_t i = 0; i < job.keep; ++i) {
            values[row * job.keep + i] = all[static_cast<size_t>(i)].value;
            labels[row * job.keep + i] = all[static_cast<size_t>(i)].label;
        }
    }
}

// One chunk of rows on a team of threads: pack the panels of rows, do the shares of the labels, add up what they leave.
struct Pass {
    const Kernels& kernels;
    const Job& job;
    Tasks pack, shares, reduce;
    const bool sums;                                      // shares leave sums
    const std::unique_ptr<std::atomic<bool>[]> one_done;  // for every node of the tree over the shares, of its two children

    Pass(const Kernels& k, const Job& j, int64_t panels)
        : kernels(k), job(j), pack(panels), shares(j.shares), reduce(j.consumer == Consumer::loss ? panels : 0),
          sums(j.consumer == Consumer::loss), one_done(new std::atomic<bool>[static_cast<size_t>(j.shares)]()) {}

    // Node 1 is the root, 2 i and 2 i + 1 are the children of i, shares + i is share i.  Who comes second to a node adds up
    // its children: mostly sums that are still in its cache.  Those of the root are left to Phase::reduce.
    void merge(int64_t share) {
        int64_t node = job.shares + share, width = 1;
        for (; node > 3 && one_done[static_cast<size_t>(node / 2)].exchange(true); node /= 2, width *= 2) {
            const int64_t left = node / 2 * 2 * width - job.shares;
            kernels.merge(job, left, left + width);
        }
    }

    void work(Team& team, int thread) {
        const auto run = [&](Tasks& tasks, Phase phase) {
            // Every thread begins where it did in the step before: what it had then may still be in its cache.  With topk all
            // begin at 0, because of equal logits a thread that has seen one must not be shown a lower label.
            const int64_t first = job.consumer == Consumer::topk ? 0 : tasks.count * thread / job.threads;
            team.take(tasks, first, [&](int64_t task) {
                kernels.run(job, phase, task, thread);
                if (phase == Phase::tiles && sums) merge(task);
            });
        };
        run(pack, Phase::pack);
        team.wait_for(pack);
        run(shares, Phase::tiles);
        if (thread == 0) team.wait_for(shares);
        if (!shares.all_done()) return;  // the caller waits for those who are still at it
        run(reduce, Phase::reduce);
    }
};

void run_pass(const Kernels& kernels, const Job& job) {
    const int64_t lanes = kernels.panel_bytes / (job.dtype == Dtype::f64 ? 8 : 4);
    Pass pass(kernels, job, (job.rows + lanes - 1) / lanes);
    run_team(job.threads, [](void* pass, Team& team, int thread) { static_cast<Pass*>(pass)->work(team, thread); }, &pass);
}

}  // namespace

void run_job(const Kernels& kernels, Job whole, int64_t chunk, const Outputs& outputs) {
    if (whole.indices) check_targets(whole);
    if (chunk < whole.rows && (updates(whole.weight_update) || updates(whole.bias_update)))
        throw std::invalid_argument("an update needs the gradient of all rows: take them as one chunk");
    const int64_t real = whole.dtype == Dtype::f64 ? 8 : 4;
    for (int64_t first = 0; first < whole.rows; first += chunk) {
        Job job = rows_of(whole, first, std::min(chunk, whole.rows - first));
        std::vector<char> heap_values;
        std::vector<int64_t> heap_labels, heap_sizes;
        if (job.consumer == Consumer::topk) {
            const int64_t slots = job.threads * job.rows;
            heap_values.resize(static_cast<size_t>(slots * job.keep * real));
            heap_labels.resize(static_cast<size_t>(slots * job.keep));
            heap_sizes.assign(static_cast<size_t>(slots), 0);
            job.heap_values = heap_values.data();
            job.heap_labels = heap_labels.data();
            job.heap_sizes = heap_sizes.data();
        }
        if (job.consumer == Consumer::predict) {
            outputs.found->first_row.resize(outputs.found->first_row.size() + job.shares, first);
            outputs.found->lists.resize(outputs.found->lists.size() + job.shares, {nullptr, 0, 0, grow});
            job.hits = outputs.found->lists.data() + outputs.found->lists.size() - job.shares;
        }
        job.workspace = workspace(kernels.workspace_bytes(job));
        run_pass(kernels, job);
        if (job.consumer == Consumer::topk) {
            int64_t* labels = outputs.top_labels + first * job.keep;
            if (job.dtype == Dtype::f64)
                merge_heaps(job, static_cast<double*>(outputs.top_values) + first * job.keep, labels);
            else
                merge_heaps(job, static_cast<float*>(outputs.top_values) + first * job.keep, labels);
        }
        if (job.consumer == Consumer::predict)
            for (int i = 0; i < job.shares; ++i) outputs.found->total += job.hits[i].size;
    }
}

Found::~Found() {
    for (Hits& list : lists) std::free(list.data);
}

void Found::write(int64_t rows, int64_t* offsets, int64_t* indices) const {
    std::fill(offsets, offsets + rows + 1, 0);
    for (size_t i = 0; i < lists.size(); ++i)
        for (int64_t j = 0; j < lists[i].size; ++j) ++offsets[first_row[i] + lists[i].data[j].row + 1];
    for (int64_t row = 0; row < rows; ++row) offsets[row + 1] += offsets[row];
    std::vector<int64_t> next(offsets, offsets + rows);
    // Shares are rising ranges of labels and list them in order, so every row comes out sorted.
    for (size_t i = 0; i < lists.size(); ++i)
        for (int64_t j = 0; j < lists[i].size; ++j) {
            const Hit& hit = lists[i].data[j];
            indices[next[static_cast<size_t>(first_row[i] + hit.row)]++] = hit.label;
        }
}

}  // namespace sk
