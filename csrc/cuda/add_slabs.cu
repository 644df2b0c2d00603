#include "add_slabs.cuh"

#include "launch.cuh"

namespace sk {

template <class T>
static void add(const LaunchOn& on, const AddSlabs& a) {
    const AddSlabsArgs<T> args{static_cast<const T*>(a.slabs), static_cast<T*>(a.out), static_cast<const T*>(a.scale),
                               a.count, a.size, a.accumulate};
    const int64_t blocks = std::min<int64_t>((a.size + 31) / 32, INT32_MAX);
    launch(on, "add_slabs", add_slabs_kernel<T>, dim3(static_cast<unsigned>(blocks)), THREADS * int(sizeof(T)), args);
}

void add_slabs(const LaunchOn& on, const AddSlabs& a) {
    if (a.size == 0) return;
    if (a.wide) add<double>(on, a);
    else add<float>(on, a);
}

}  // namespace sk
