// A team of threads that takes tasks one by one.
//
// The threads are those of the OpenMP runtime, which torch has loaded and shares: a pool of our own would compete with its
// waiting threads for the cores.  What differs from `omp parallel for` is how a team waits.  On a busy machine any thread
// may lose its core for milliseconds.  So nobody is given work in advance; who has to wait sleeps after a moment, which
// frees a core for the one that is waited for; and after a call that was held up the next ones do without other threads,
// whose waiting inside the runtime would take the time of those who work.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>

namespace sk {

// Tasks 0 ... count-1 of one kind.
struct Tasks {
    explicit Tasks(int64_t n) : count(n), taken(new std::atomic<bool>[static_cast<size_t>(n)]()) {}
    bool all_done() const { return done.load() >= count; }

    const int64_t count;
    const std::unique_ptr<std::atomic<bool>[]> taken;
    std::atomic<int64_t> done{0};
};

class Team {
  public:
    // Does tasks as long as there are any to take, f(task) each, in rising order from `first` on and then from 0 on.  The
    // first exception is kept for the caller of run_team; tasks after it are passed over.
    template <class F>
    void take(Tasks& tasks, int64_t first, F&& f) {
        for (int64_t i = 0; i < tasks.count; ++i) {
            const int64_t task = first + i < tasks.count ? first + i : first + i - tasks.count;
            std::atomic<bool>& taken = tasks.taken[static_cast<size_t>(task)];
            if (taken.load() || taken.exchange(true)) continue;
            try {
                if (!failed.load()) f(task);
            } catch (...) {
                if (!failed.exchange(true)) failure = std::current_exception();
            }
            tasks.done.fetch_add(1);
        }
    }

    // Returns when all tasks are done.
    void wait_for(const Tasks& tasks) {
        wait([](const void* tasks) { return static_cast<const Tasks*>(tasks)->all_done(); }, &tasks);
    }

  private:
    friend void run_team(int threads, void (*work)(void*, Team&, int), void* context);

    void enter(void (*work)(void*, Team&, int), void* context, int thread);
    static void wait(bool (*ready)(const void*), const void* context);

    std::atomic<int> left{0};
    std::atomic<bool> failed{false};
    std::exception_ptr failure;
};

// Calls work(context, team, thread) on up to `threads` threads, thread 0 being the caller, and returns when all have left
// it.  Throws the first exception of any of them then.  `work` must do with fewer threads too.
void run_team(int threads, void (*work)(void*, Team&, int thread), void* context);

// f(task) for task = 0 ... count-1 on up to `threads` threads.
template <class F>
void for_tasks(int threads, int64_t count, F&& f) {
    struct Call {
        F& f;
        Tasks tasks;
    } call{f, Tasks(count)};
    run_team(static_cast<int>(count < threads ? count : threads), [](void* c, Team& team, int) {
        auto& call = *static_cast<Call*>(c);
        team.take(call.tasks, 0, call.f);
    }, &call);
}

}  // namespace sk
