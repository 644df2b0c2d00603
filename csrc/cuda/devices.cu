#include "launch.cuh"

namespace sk {

int64_t processors(int device) {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return count;
}

int device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
}

std::pair<int, int> versions() {
    int driver = 0, runtime = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || cudaRuntimeGetVersion(&runtime) != cudaSuccess)
        cudaGetLastError();
    return {driver, runtime};
}

std::pair<int, int> capability(int device) {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    return {major, minor};
}

std::string devices() {
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        cudaGetLastError();
        return std::string("no CUDA driver: ") + cudaGetErrorString(error);
    }
    std::string names;
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp properties;
        check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
        names += (i ? ", " : "") + std::string(properties.name) + " (sm_" +
                 std::to_string(properties.major * 10 + properties.minor) + ")";
    }
    return count ? names : "no GPU";
}

}  // namespace sk
