#include "cpu/threads.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif
#ifndef _WIN32
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sk {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

// Who waits longer than this goes to sleep, and looks again every so often.  It is not woken: a thread that is woken takes
// the core of the one that wakes it, which still has to reach the runtime's barrier, and there it would be waited for with
// that core kept busy.
constexpr microseconds kSpin{60}, kNap{50};

// A call is held up when it has lost more than this and a third of its time.
constexpr microseconds kHeldUp{200};
// The next calls then do without other threads: for twice as long as that one took, and twice as long every time after
// that, up to this.
constexpr microseconds kAloneMost{40'000};

// The OpenMP runtime's threads do not survive fork(): a child that used them would wait for them for ever.  torch may
// have started them before the first call here, so every forked child does without.
std::atomic<bool> forked{false};

#ifndef _WIN32
[[maybe_unused]] const int watches_fork = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
#endif

// When calls may use other threads again, and for how long they could not: nanoseconds of the clock.
std::atomic<int64_t> alone_until{0}, alone_for{0};
// The first call after that finds the runtime's threads asleep.  What it waits for them says nothing of the next ones.
std::atomic<bool> asleep{false};

int64_t nanoseconds_of(Clock::duration time) { return std::chrono::duration_cast<nanoseconds>(time).count(); }

void note_team(bool held_up, Clock::time_point start, Clock::time_point end) {
    if (asleep.exchange(false, std::memory_order_relaxed)) return;
    if (!held_up) return alone_for.store(0, std::memory_order_relaxed);
    const int64_t before = std::max(alone_for.load(std::memory_order_relaxed), nanoseconds_of(end - start));
    const int64_t longer = std::min(2 * before, nanoseconds_of(kAloneMost));
    alone_for.store(longer, std::memory_order_relaxed);
    asleep.store(true, std::memory_order_relaxed);
    alone_until.store(nanoseconds_of(end.time_since_epoch()) + longer, std::memory_order_relaxed);
}

// Time that this thread has spent on a core, where that can be asked.
nanoseconds on_core() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
    timespec time;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0)
        return std::chrono::seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
#endif
    return nanoseconds(0);
}

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void Team::wait(bool (*ready)(const void*), const void* context) {
    if (ready(context)) return;
    const Clock::time_point stop = Clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            pause();
            if (ready(context)) return;
        }
    } while (Clock::now() < stop);
    while (!ready(context)) std::this_thread::sleep_for(kNap);
}

void Team::enter(void (*work)(void*, Team&, int), void* context, int thread) {
    try {
        work(context, *this, thread);
    } catch (...) {
        if (!failed.exchange(true)) failure = std::current_exception();
    }
}

void run_team(int threads, void (*work)(void*, Team&, int), void* context) {
    if (threads < 1) return;
    Team team;
    const Clock::time_point start = Clock::now();
    const int64_t now = nanoseconds_of(start.time_since_epoch());
    if (threads == 1 || now < alone_until.load(std::memory_order_relaxed)) {
        team.enter(work, context, 0);
        if (team.failure) std::rethrow_exception(team.failure);
        return;
    }
    const nanoseconds core_start = on_core();
    nanoseconds core = core_start;
    Clock::time_point own_end = start;
    int others = 0;
    const auto caller = [&] {
        team.enter(work, context, 0);
        own_end = Clock::now(), core = on_core();
        // Before the runtime's own barrier, where a thread that waits keeps its core busy.
        struct Leaving {
            const std::atomic<int>& left;
            int others;
        } leaving{team.left, others};
        Team::wait([](const void* c) {
            const auto* leaving = static_cast<const Leaving*>(c);
            return leaving->left.load() == leaving->others;
        }, &leaving);
    };
    const auto other = [&](int thread) {
        team.enter(work, context, thread);
        team.left.fetch_add(1);
    };
    bool own_threads = true;
#if defined(_OPENMP)
    if (!forked.load()) {
        own_threads = false;
#pragma omp parallel num_threads(threads)
        {
            if (const int thread = omp_get_thread_num()) {
                other(thread);
            } else {
                others = omp_get_num_threads() - 1;
                caller();
            }
        }
    }
#endif
    if (own_threads) {
        std::vector<std::thread> started;
        try {
            for (int thread = 1; thread < threads; ++thread) started.emplace_back(other, thread);
        } catch (const std::exception&) {  // no more threads to be had: fewer do it
        }
        others = static_cast<int>(started.size());
        caller();
        for (std::thread& thread : started) thread.join();
    }
    const Clock::time_point end = Clock::now();
    // Time that was waited, at the end or before, or in which another process had the core.
    const auto lost = core > core_start ? end - start - (core - core_start) : end - own_end;
    note_team(lost > kHeldUp + (end - start) / 3, start, end);
    if (team.failure) std::rethrow_exception(team.failure);
}

}  // namespace sk
