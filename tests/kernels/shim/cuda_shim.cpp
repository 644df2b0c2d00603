// The scheduler of the host shim: fibers, barriers, and what the sanitizers need to know about both.
//
// Compile this file without -fsanitize, but with SHIM_ASAN or SHIM_TSAN where the kernels have it: the scheduler
// touches the state of every fiber, which is no race of the kernels.
#include "cuda_shim.h"

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#if defined(SHIM_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SHIM_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}
#endif

#if defined(__x86_64__)
// Saves the callee-saved registers on this stack and continues on another: no system call, unlike swapcontext.
extern "C" void shim_switch(void** save, void* to);
__asm__(
    ".text\n.globl shim_switch\n.type shim_switch,@function\nshim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size shim_switch,.-shim_switch\n");
#else
#error "the host shim switches stacks by hand: x86-64 only"
#endif

namespace shim {

Thread* current = nullptr;
thread_local int context = 0;
unsigned contexts = 0;
int attributes_set = 0;

namespace {

constexpr size_t STACK = 64 * 1024;
#if defined(SHIM_TSAN)
constexpr bool KEEP_STACKS = true;  // a stack that two fibers use in turn would look like a race
#else
constexpr bool KEEP_STACKS = false;
#endif
enum class State { ready, at_block, at_warp, done };

struct Fiber : Thread {
    State state = State::ready;
    void* stack_pointer = nullptr;
    std::unique_ptr<unsigned char[]> stack{new unsigned char[STACK]};
    void* tsan = nullptr;
    unsigned phase[2] = {0, 0};  // barriers passed: of the block, of the warp
    void* fake_stack = nullptr;
};

void* scheduler_pointer = nullptr;
const std::function<void()>* kernel_now = nullptr;
void* scheduler_tsan = nullptr;
char end_of_grid;  // every thread of a grid happens before what follows the launch

// Two objects per barrier, used in turn: a thread that is already at the next barrier must not be mistaken for one
// that had arrived at this one.
struct Meeting {
    char turn[2];
};
struct Meetings {  // of one block: barriers order its own threads, and nothing between blocks
    Meeting block, warp[32];
};
Meetings* meetings_now = nullptr;

#if defined(SHIM_ASAN)
const void* scheduler_bottom = nullptr;
size_t scheduler_size = 0;
#endif

void to_scheduler(Fiber& self, bool ends) {
#if defined(SHIM_TSAN)
    __tsan_switch_to_fiber(scheduler_tsan, 1);  // 1: the switch itself orders nothing
#endif
#if defined(SHIM_ASAN)
    __sanitizer_start_switch_fiber(ends ? nullptr : &self.fake_stack, scheduler_bottom, scheduler_size);
#endif
    (void)ends;
    shim_switch(&self.stack_pointer, scheduler_pointer);
#if defined(SHIM_ASAN)
    __sanitizer_finish_switch_fiber(self.fake_stack, &scheduler_bottom, &scheduler_size);
#endif
}

void to_fiber(Fiber& fiber) {
    current = &fiber;
#if defined(SHIM_TSAN)
    __tsan_switch_to_fiber(fiber.tsan, 1);
#endif
#if defined(SHIM_ASAN)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), STACK);
#endif
    shim_switch(&scheduler_pointer, fiber.stack_pointer);
#if defined(SHIM_ASAN)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void enter() {
#if defined(SHIM_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
#endif
    (*kernel_now)();
    auto& self = static_cast<Fiber&>(*current);
#if defined(SHIM_TSAN)
    __tsan_release(&end_of_grid);
#endif
    self.state = State::done;
    to_scheduler(self, true);
    abort();
}

void wait(State state, int which, Meeting& meeting) {
    auto& self = static_cast<Fiber&>(*current);
    char* object = &meeting.turn[self.phase[which]++ % 2];
    (void)object;
#if defined(SHIM_TSAN)
    __tsan_release(object);
#endif
    self.state = state;
    to_scheduler(self, false);
#if defined(SHIM_TSAN)
    __tsan_acquire(object);
#endif
}

struct Order {
    int kind = 0;  // 0 forward, 1 reverse, 2 random
    std::mt19937 random;

    Order() {
        const char* told = getenv("SHIM_ORDER");
        const std::string order = told ? told : "forward";
        if (order == "reverse") kind = 1;
        else if (order.rfind("random:", 0) == 0) kind = 2, random.seed(unsigned(atoi(order.c_str() + 7)));
        else if (order != "forward") fail("SHIM_ORDER must be forward, reverse or random:<seed>");
    }
    template <class T>
    void arrange(std::vector<T>& items) {
        std::sort(items.begin(), items.end());
        if (kind == 1) std::reverse(items.begin(), items.end());
        if (kind == 2) std::shuffle(items.begin(), items.end(), random);
    }
};

// Releases every warp whose 32 lanes wait for each other, or else the whole block; false when nobody can go on.
bool release(std::vector<Fiber>& fibers) {
    bool any = false, all = true;
    for (size_t first = 0; first < fibers.size(); first += 32) {
        bool whole = true;
        for (size_t i = first; i < first + 32; ++i) whole &= fibers[i].state == State::at_warp;
        for (size_t i = first; whole && i < first + 32; ++i) fibers[i].state = State::ready;
        any |= whole;
    }
    if (any) return true;
    for (auto& fiber : fibers) all &= fiber.state == State::at_block;
    for (auto& fiber : fibers)
        if (all) fiber.state = State::ready;
    return all;
}

void run_block(Block& block, std::vector<Fiber>& fibers, Order& order) {
    std::vector<int> turn(fibers.size());
    for (size_t i = 0; i < fibers.size(); ++i) {
        Fiber& fiber = fibers[i];
        turn[i] = int(i);
        fiber.index = dim3(unsigned(i));
        fiber.block = &block;
        fiber.state = State::ready;
        fiber.phase[0] = fiber.phase[1] = 0;
        fiber.fake_stack = nullptr;
        // As if `enter` had been called: six saved registers below its address, the stack 8 short of a multiple of 16.
        auto top = (reinterpret_cast<uintptr_t>(fiber.stack.get()) + STACK) & ~uintptr_t(15);
        auto* frame = reinterpret_cast<void**>(top - 16);
        *frame = reinterpret_cast<void*>(&enter);
        for (int r = 1; r <= 6; ++r) frame[-r] = nullptr;
        fiber.stack_pointer = frame - 6;
#if defined(SHIM_TSAN)
        fiber.tsan = __tsan_create_fiber(0);
#endif
    }
    for (;;) {
        order.arrange(turn);
        bool ran = false, unfinished = false;
        for (int i : turn) {
            if (fibers[i].state == State::ready) to_fiber(fibers[i]), ran = true;
            unfinished |= fibers[i].state != State::done;
        }
        if (!unfinished) break;
        if (!release(fibers) && !ran) fail("threads of a block wait for others that will not come");
    }
}

}  // namespace

void fail(const char* what) {
    fprintf(stderr, "cuda shim: %s\n", what);
    abort();
}

void wait_block() { wait(State::at_block, 0, meetings_now->block); }
void wait_warp() { wait(State::at_warp, 1, meetings_now->warp[current->index.x / 32]); }

void run(dim3 grid, int threads, int shared_bytes, const std::function<void()>& kernel) {
    if (threads % 32 || threads > 1024) fail("a block needs a multiple of 32 threads, at most 1024");
    kernel_now = &kernel;
#if defined(SHIM_TSAN)
    scheduler_tsan = __tsan_get_current_fiber();
#endif
    Order order;
    std::vector<std::pair<unsigned, unsigned>> blocks;
    for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) blocks.emplace_back(y, x);
    order.arrange(blocks);
    // Stacks and shared memory outlive the grid: freeing one would order its block before the next.
    std::vector<std::vector<Fiber>> fibers;
    std::vector<std::vector<Warp>> warps;
    std::vector<void*> shared;
    std::vector<Meetings> meetings(blocks.size());
    meetings_now = meetings.data();
    for (const auto& at : blocks) {
        if (fibers.empty() || KEEP_STACKS) fibers.emplace_back(static_cast<size_t>(threads));
        // Exactly the bytes that were asked for, full of NaN: reading what nobody wrote shows in the result.
        void* raw = nullptr;
        if (posix_memalign(&raw, 128, static_cast<size_t>(shared_bytes))) fail("out of memory");
        memset(raw, 0xff, static_cast<size_t>(shared_bytes));
        shared.push_back(raw);
        warps.emplace_back(static_cast<size_t>(threads) / 32);
        Block block{dim3(at.second, at.first), grid, static_cast<unsigned char*>(raw), warps.back().data()};
        run_block(block, fibers.back(), order);
        ++meetings_now;
    }
#if defined(SHIM_TSAN)
    // Not before: a new fiber would take the place of a destroyed one, and pass for the same thread.
    for (auto& block : fibers)
        for (auto& fiber : block) __tsan_destroy_fiber(fiber.tsan);
    __tsan_acquire(&end_of_grid);
#endif
    for (void* raw : shared) free(raw);
}

}  // namespace shim

// For the tests, by ctypes.
extern "C" {
int shim_context() { return shim::context; }
void shim_set_context(int context) { shim::context = context; }
unsigned shim_contexts() { return shim::contexts; }
int shim_attributes_set() { return shim::attributes_set; }
}
