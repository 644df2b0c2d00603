// Memory of large gradients that is used again.
//
// A fresh array costs a page fault every 4 KiB, which for many labels is more time than the arithmetic.  So the memory of a
// gradient outlives it: the next one of that size takes it.  What has waited longest goes first.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace sk {

// Any thread may call, and fork() at any time.
class GradientMemory {
  public:
    // Uninitialised memory on a cache line (64 bytes).  Throws std::bad_alloc.
    void* take(size_t bytes);
    // Keeps the memory of a tensor that is gone.
    void give_back(void* memory, size_t bytes) noexcept;
    // Lets everything that waits go.
    void forget() noexcept;

    size_t waiting_bytes();
    size_t least_bytes();            // of memory that is kept: the allocator itself keeps what is smaller
    size_t most_bytes();             // that wait
    void set_least_bytes(size_t bytes);
    void set_most_bytes(size_t bytes);

    std::mutex lock;  // public for the handlers of fork()

  private:
    struct Waiting {
        void* memory;
        size_t bytes;
    };

    std::vector<Waiting> waiting_;  // the oldest first
    size_t waiting_bytes_ = 0, least_bytes_ = size_t{1} << 20, most_bytes_ = size_t{1} << 30;
};

// The one of this process.  It is never destroyed: tensors may outlive everything else.
GradientMemory& gradient_memory();

}  // namespace sk
