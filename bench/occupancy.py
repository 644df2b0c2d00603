"""Theoretical occupancy of the CUDA kernels, worked out without a GPU.

    python bench/occupancy.py [--arch sm_80 --arch sm_90] [--json]

Registers come from ptxas, shared memory from the kernels' own headers (with the factors of n = 8921, k = 80), and the
number of resident blocks from NVIDIA's cuda_occupancy.h. Needs nvcc. Each kernel is compiled for each architecture: about a minute per architecture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
sys.path.insert(0, str(ROOT / "tests" / "kernels"))
from ptxas import Usage, usages  # noqa: E402

KERNELS = ("fused_loss", "confusion_loss", "add_slabs", "logits", "predict", "topk")
# (name, multiprocessors, threads and bytes of shared memory per multiprocessor, bytes per block)
DEVICES = {
    "sm_80": ("A100", 108, 2048, 167936, 166912),
    "sm_90": ("H100 SXM", 132, 2048, 233472, 232448),
    "sm_100": ("B200", 148, 2048, 233472, 232448),
    "sm_120": ("RTX PRO 6000", 188, 1536, 102400, 101376),
}
# Reads "major minor threads_per_sm shared_per_sm shared_per_block registers kernel dtype", prints "blocks shared".
PROGRAM = r"""
#include <cuda_occupancy.h>
#include <cstdio>
#include <string>
#include "confusion_loss.cuh"
#include "fused_loss.cuh"
#include "launch.cuh"
#include "logits.cuh"
#include "predict.cuh"
#include "topk.cuh"
// With U and V of n = 8921, k = 80: rank 9.
template <class K>
int shared_of(const std::string& kernel) {
    if (kernel == "add_slabs") return sk::THREADS * sizeof(typename K::Acc);
    const int own = kernel == "fused_loss" ? sk::FusedShared<K>::bytes
                  : kernel == "confusion_loss" ? sk::ConfusionShared<K>::bytes
                  : kernel == "topk" ? sk::TopkShared<K>::bytes
                  : kernel == "predict" ? sk::PredictShared<K>::bytes : sk::Shared<K>::bytes_scan;
    const int factors = 9 * (sk::TILE + 81) * sizeof(typename K::Acc);
    const int most = own > sk::BLOCK_BYTES<K> ? sk::ONE_BLOCK_BYTES : sk::BLOCK_BYTES<K>;
    return own + factors <= most ? own + factors : own;
}
int main() {
    int major, minor, threads, per_sm, per_block, registers;
    char kernel[32], dtype[32];
    while (scanf("%d %d %d %d %d %d %31s %31s", &major, &minor, &threads, &per_sm, &per_block, &registers, kernel,
                 dtype) == 8) {
        const std::string d = dtype;
        const int shared = d == "float32" ? shared_of<sk::F32>(kernel) : d == "tf32" ? shared_of<sk::TF32>(kernel)
                         : d == "float16" ? shared_of<sk::F16>(kernel) : d == "bfloat16" ? shared_of<sk::BF16>(kernel)
                         : shared_of<sk::F64>(kernel);
        cudaOccDeviceProp device;
        device.computeMajor = major, device.computeMinor = minor, device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = threads, device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.warpSize = 32, device.sharedMemPerBlock = 49152, device.sharedMemPerMultiprocessor = per_sm;
        device.numSms = 1, device.sharedMemPerBlockOptin = per_block, device.reservedSharedMemPerBlock = 1024;
        cudaOccFuncAttributes function;
        function.maxThreadsPerBlock = 1024, function.numRegs = registers, function.sharedSizeBytes = 0;
        function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, function.maxDynamicSharedSizeBytes = per_block;
        cudaOccDeviceState state;
        cudaOccResult result;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, sk::THREADS, shared)) return 1;
        printf("%d %d\n", result.activeBlocksPerMultiprocessor, shared);
    }
}
"""


def compile_kernel(nvcc: str, kernel: str, arch: str) -> list[Usage]:
    """What ptxas reports for one ``.cu`` on one architecture."""
    command = [nvcc, "-std=c++17", "-O3", f"-I{CSRC}", f"-arch={arch}", "-cubin", "-Xptxas", "-v"]
    command += [str(CSRC / "cuda" / f"{kernel}.cu"), "-o", "/dev/null"]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        raise SystemExit(f"nvcc failed on {kernel}.cu for {arch}:\n{compiled.stderr}")
    # Both passes of predict have one name: the hungrier one counts.
    most: dict[str, Usage] = {}
    for usage in usages(compiled.stderr):
        if usage.dtype not in most or usage.registers > most[usage.dtype].registers:
            most[usage.dtype] = usage
    return list(most.values())


def resident(nvcc: str, found: list[Usage]) -> list[tuple[int, int]]:
    """(blocks per multiprocessor, shared memory per block) of each entry."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "occupancy.cu")
        source.write_text(PROGRAM)
        program = source.with_suffix("")
        include = [f"-I{CSRC}", f"-I{CSRC / 'cuda'}"]
        subprocess.run([nvcc, "-std=c++17", "-arch=sm_80", *include, str(source), "-o", str(program)], check=True)
        lines = []
        for usage in found:
            number = int(usage.arch.removeprefix("sm_"))
            _, _, threads, per_sm, per_block = DEVICES[usage.arch]
            sizes = (number // 10, number % 10, threads, per_sm, per_block, usage.registers)
            lines.append(" ".join(map(str, (*sizes, usage.kernel, usage.dtype))))
        done = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True)
    return [(int(blocks), int(shared)) for blocks, shared in (line.split() for line in done.stdout.splitlines())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=list(DEVICES), help="default: all of them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        parser.error("nvcc is not on PATH: install the CUDA toolkit")
    jobs = [(nvcc, kernel, arch) for arch in args.arch or DEVICES for kernel in KERNELS]
    with ThreadPoolExecutor(2) as pool:
        parts = tqdm(pool.map(lambda job: compile_kernel(*job), jobs), total=len(jobs), unit="file", disable=None)
        found = [usage for part in parts for usage in part]
    rows = []
    for usage, (blocks, shared) in zip(found, resident(nvcc, found), strict=True):
        name, _, threads, _, _ = DEVICES[usage.arch]
        share = 256 * blocks / threads
        row = dict(arch=usage.arch, device=name, kernel=usage.kernel, dtype=usage.dtype, registers=usage.registers)
        rows.append(row | dict(spills=usage.spills, shared=shared, blocks=blocks, occupancy=share))
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        return
    print("| arch | kernel | dtype | registers | spilled bytes | shared KB | blocks per SM | occupancy |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = [row["arch"], row["kernel"], row["dtype"], row["registers"], row["spills"]]
        cells += [f"{row['shared'] / 1024:.1f}", row["blocks"], f"{row['occupancy']:.0%}"]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
