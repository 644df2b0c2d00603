// Memory of gradients (cpu/gradient_memory.h) under ThreadSanitizer: threads that take, write and give back.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/gradient_memory.h"

int main() {
    sk::GradientMemory& memory = sk::gradient_memory();
    memory.set_most_bytes(5 << 20);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number)
        threads.emplace_back([&, number] {
            for (size_t round = 0; round < 400; ++round) {
                const size_t bytes = (size_t{1} << 20) + round % 3 * 64;
                auto* numbers = static_cast<char*>(memory.take(bytes));
                std::memset(numbers, number, 4096);
                for (int i = 0; i < 4096; ++i) wrong += numbers[i] != number;
                memory.give_back(numbers, bytes);
                if (round % 100 == 99) memory.forget();
            }
        });
    for (std::thread& thread : threads) thread.join();
    const size_t waiting = memory.waiting_bytes();
    memory.forget();
    std::printf("wrong %d waiting %d left %d\n", wrong.load(), static_cast<int>(waiting <= 5 << 20),
                static_cast<int>(memory.waiting_bytes()));
}
