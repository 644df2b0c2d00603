"""Compiles the Triton kernels for GPUs that are not here, and prints what became of them as JSON.

    python tests/kernels/triton_ahead.py cuda:80 cuda:90 cuda:100 hip:gfx942 [--all]

Without ``--all``: every kernel and configuration for 16-bit inputs, the loss for the other dtypes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def source(kernel: str, dtype: str, config):
    """A launch as the backend makes it, for the hardest case of each kernel: every option on, a fractional exponent."""
    import triton.language as tl
    from triton.compiler import ASTSource

    from sigkernels.backends.triton import configs, kernels

    function = getattr(kernels, f"{kernel}_kernel")
    element, acc = f"*{NAMES[dtype]}", "*fp64" if dtype == "float64" else "*fp32"
    types = dict.fromkeys(("x", "weight", "bias", "out", "grad"), element)
    types |= dict.fromkeys(
        ("c", "u", "dense", "label_weight", "label_pos_weight", "row_factor", "row_sums", "threshold"), acc
    )
    types |= dict.fromkeys(("indices", "starts"), "*i64") | dict.fromkeys(("at", "best_labels", "counts"), "*i32")
    types["best_keys"] = "*i64" if dtype == "float64" else "*i32"
    exact = dtype in ("float32", "float64")
    constants = dict(
        BM=config.BM, BN=configs.TILE, BK=config.BK, RP=16, M=configs.MAX_LIST, FILL=True, HAS_BIAS=True,
        ACC=tl.float64 if dtype == "float64" else tl.float32, UPCAST=False, PRECISION="ieee" if exact else "tf32",
        SPARSE=True, HAS_WEIGHT=True, HAS_POS_WEIGHT=True, GRADIENT=True, KIND=2, SMOOTHING=0.0, GAMMA_POS=1.0,
        GAMMA_NEG=3.5, ALPHA_POS=1.0, ALPHA_NEG=1.0, CLIP=0.05, EPS=1e-8, DETACH=False,
    )  # fmt: skip
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    return ASTSource(function, signature, values, aligned)


def compile_one(job: tuple[str, str, str, str, int]) -> dict[str, object]:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from sigkernels.backends.triton import configs

    platform, arch, kernel, dtype, index = job
    config = configs.candidates(platform, getattr(torch, dtype), kernel)[index]
    target = GPUTarget(platform, int(arch) if platform == "cuda" else arch, 32 if platform == "cuda" else 64)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    made = triton.compile(source(kernel, dtype, config), target=target, options=options)
    report = dict(target=f"{platform}:{arch}", kernel=kernel, dtype=dtype, config=config, shared=made.metadata.shared)
    if platform == "cuda":
        return report | _nvidia(made.asm["ptx"])
    text = made.asm["amdgcn"]
    registers, spills = (re.search(rf"\.{name}_count: +(\d+)", text) for name in ("vgpr", "vgpr_spill"))
    return report | dict(registers=int(registers[1]), spills=int(spills[1]), tensor_cores="mfma" in text)


def _nvidia(ptx: str) -> dict[str, object]:
    """What ptxas, the newest that triton brings, makes of the PTX."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = next(path for path in (folder / "ptxas-blackwell", folder / "ptxas") if path.exists())
    arch = re.search(r"\.target (sm_\w+)", ptx)[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"(\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
    cores = bool(re.search(r"mma\.sync|wgmma|tcgen05\.mma", ptx))
    return dict(registers=int(registers[1]), spills=int(spills[1]), tensor_cores=cores)


def jobs(targets: list[str], everything: bool) -> list[tuple[str, str, str, str, int]]:
    import torch

    from sigkernels.backends.triton import configs

    found = []
    for target in targets:
        platform, arch = target.split(":")
        for kernel in ("fused_loss", "logits", "predict", "topk"):
            for dtype in ("bfloat16", "float32", "float64"):
                count = len(configs.candidates(platform, getattr(torch, dtype), kernel))
                if everything or dtype == "bfloat16" or kernel == "fused_loss":
                    found += [(platform, arch, kernel, dtype, index) for index in range(count)]
    return found


if __name__ == "__main__":
    wanted = jobs([a for a in sys.argv[1:] if a != "--all"], "--all" in sys.argv)
    with ProcessPoolExecutor(2) as pool:
        json.dump(list(pool.map(compile_one, wanted)), sys.stdout)
