// The context that is current in a thread.  The runtime has no word for "none": cudaGetDevice says 0, and going back to 0
// with cudaSetDevice would make a context there.  The driver has one; it is looked up when it is there.
#pragma once

#include <dlfcn.h>

namespace sk {

struct DriverContext {
    int (*get)(void**) = nullptr;
    int (*set)(void*) = nullptr;
};

inline const DriverContext& driver_context() {
    static const DriverContext found = [] {
        DriverContext driver;
        if (void* library = dlopen("libcuda.so.1", RTLD_LAZY)) {
            driver.get = reinterpret_cast<int (*)(void**)>(dlsym(library, "cuCtxGetCurrent"));
            driver.set = reinterpret_cast<int (*)(void*)>(dlsym(library, "cuCtxSetCurrent"));
        }
        return driver;
    }();
    return found;
}

}  // namespace sk
