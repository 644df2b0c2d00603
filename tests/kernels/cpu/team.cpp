// Teams of threads (cpu/threads.h) under ThreadSanitizer: tasks in two stages, the second of which reads what others wrote
// in the first.
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "cpu/threads.h"

namespace {

struct Stages {
    explicit Stages(int64_t count) : first(count), second(count), written(count, 0), read(count, 0) {}

    sk::Tasks first, second;
    std::vector<int64_t> written, read;

    void work(sk::Team& team) {
        team.take(first, 0, [&](int64_t task) {
            std::this_thread::sleep_for(std::chrono::microseconds(30));  // others are to take tasks too
            written[task] = task + 1;
        });
        team.wait_for(first);
        team.take(second, 0, [&](int64_t task) { read[task] = written[written.size() - 1 - task]; });
    }
};

}  // namespace

int main() {
    int64_t total = 0;
    for (int round = 0; round < 200; ++round) {
        Stages stages(17);
        sk::run_team(1 + round % 4, [](void* s, sk::Team& team, int) { static_cast<Stages*>(s)->work(team); }, &stages);
        for (int64_t value : stages.read) total += value;
    }
    std::printf("total %lld\n", static_cast<long long>(total));
}
