#include "cpu/gradient_memory.h"

#include <cstdlib>
#include <new>

#ifdef _WIN32
#include <malloc.h>
#else
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sk {
namespace {

constexpr size_t kLine = 64, kHugePage = size_t{2} << 20, kWorthHugePages = size_t{4} << 20;

void* allocate(size_t bytes) {
    void* memory = nullptr;
#ifdef _WIN32
    memory = _aligned_malloc(bytes, kLine);
    if (!memory) throw std::bad_alloc();
#else
    const bool huge = bytes >= kWorthHugePages;
    if (posix_memalign(&memory, huge ? kHugePage : kLine, bytes)) throw std::bad_alloc();
#if defined(__linux__)
    if (huge) madvise(memory, bytes, MADV_HUGEPAGE);  // where the system leaves that to be asked for
#endif
#endif
    return memory;
}

void release(void* memory) noexcept {
#ifdef _WIN32
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}

#ifndef _WIN32
// A child must not inherit a lock that a thread of its parent holds.
[[maybe_unused]] const int watches_fork =
    pthread_atfork([] { gradient_memory().lock.lock(); }, [] { gradient_memory().lock.unlock(); },
                   [] { gradient_memory().lock.unlock(); });
#endif

using Guard = std::lock_guard<std::mutex>;

}  // namespace

GradientMemory& gradient_memory() {
    static GradientMemory& memory = *new GradientMemory;
    return memory;
}

void* GradientMemory::take(size_t bytes) {
    {
        const Guard guard(lock);
        for (auto at = waiting_.rbegin(); at != waiting_.rend(); ++at) {
            if (at->bytes != bytes) continue;
            void* memory = at->memory;
            waiting_bytes_ -= bytes;
            waiting_.erase(std::next(at).base());
            return memory;
        }
    }
    return allocate(bytes);
}

void GradientMemory::give_back(void* memory, size_t bytes) noexcept {
    std::vector<Waiting> gone;
    {
        const Guard guard(lock);
        if (bytes < least_bytes_ || bytes > most_bytes_) return release(memory);
        size_t count = 0, left = waiting_bytes_ + bytes;
        while (left > most_bytes_) left -= waiting_[count++].bytes;
        try {
            gone.assign(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
            waiting_.push_back({memory, bytes});
        } catch (const std::bad_alloc&) {  // not even room to note it
            gone.clear();
            return release(memory);
        }
        waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
        waiting_bytes_ = left;
    }
    for (const Waiting& old : gone) release(old.memory);
}

void GradientMemory::forget() noexcept {
    std::vector<Waiting> gone;
    {
        const Guard guard(lock);
        gone.swap(waiting_);
        waiting_bytes_ = 0;
    }
    for (const Waiting& old : gone) release(old.memory);
}

size_t GradientMemory::waiting_bytes() {
    const Guard guard(lock);
    return waiting_bytes_;
}

size_t GradientMemory::least_bytes() {
    const Guard guard(lock);
    return least_bytes_;
}

size_t GradientMemory::most_bytes() {
    const Guard guard(lock);
    return most_bytes_;
}

void GradientMemory::set_least_bytes(size_t bytes) {
    const Guard guard(lock);
    least_bytes_ = bytes;
}

void GradientMemory::set_most_bytes(size_t bytes) {
    const Guard guard(lock);
    most_bytes_ = bytes;
}

}  // namespace sk
