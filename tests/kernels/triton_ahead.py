"""Compiles the Triton kernels for GPUs that are not here, and prints what became of them as JSON.

    python tests/kernels/triton_ahead.py cuda:80 cuda:90 cuda:100 hip:gfx942 [--all]

``--all``: every kernel, dtype, configuration and class of slack (a multiple of 16, 1, or neither: what Triton compiles
apart). Without it the part that takes about a minute: the first configurations, above all for an awkward slack.
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
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
KERNELS = ("fused_loss", "confusion_loss", "add_slabs", "logits", "predict", "topk")
FIRST = ("cuda:80", "hip:gfx942")  # of each maker: what is compiled in every class
SLACK = (64, 1, 7, 50, 100, 129)  # aligned and awkward


class Job(NamedTuple):
    platform: str
    arch: str
    kernel: str
    dtype: str
    index: int  # of the configuration
    slack: int


def slack_class(slack: int) -> str:
    """What a launch is compiled for: Triton tells these three classes of an integer apart, and no more."""
    return "one" if slack == 1 else "aligned" if slack % 16 == 0 else "awkward"


def source(kernel: str, dtype: str, config, slack: int):
    """A launch as the backend makes it, for the hardest case of each kernel: every option on, a fractional exponent."""
    import importlib

    import triton.language as tl
    from triton.compiler import ASTSource

    from sigkernels.backends.triton import configs

    home = {"fused_loss": "fused_loss", "confusion_loss": "confusion_loss", "add_slabs": "gradients"}
    module = importlib.import_module(f"sigkernels.backends.triton.kernels.{home.get(kernel, 'scans')}")
    function = getattr(module, f"{kernel}_kernel")
    element, acc = f"*{NAMES[dtype]}", "*fp64" if dtype == "float64" else "*fp32"
    types = dict.fromkeys(("x", "dft", "weight", "bias", "out", "scratch", "grad_weight"), element)
    types |= dict.fromkeys(("row_sums", "values", "grad_beta", "grad_eta"), "*fp64")
    types |= dict.fromkeys(("u", "v", "turn", "dense", "label_weight", "label_pos_weight", "row_factor"), acc)
    types |= dict.fromkeys(("threshold", "betas", "etas", "logits", "slabs", "grad_bias", "out_scale", "scale"), acc)
    types |= dict.fromkeys(("indices", "starts"), "*i64") | dict.fromkeys(("at", "best_labels", "counts"), "*i32")
    types["best_keys"] = "*i64" if dtype == "float64" else "*i32"
    if kernel == "add_slabs":
        types["out"] = acc
    wide = tl.float64 if dtype == "float64" else tl.float32
    narrow = {"bfloat16": tl.bfloat16, "float16": tl.float16}.get(dtype, wide)
    constants = dict(
        BM=config.BM, BN=configs.TILE, BK=config.BK, M=configs.MAX_LIST, FILL=True, HAS_DFT=True, HAS_BIAS=True,
        DTYPE=narrow, ACC=wide, PRECISION="ieee", SPARSE=True, HAS_WEIGHT=True, HAS_POS_WEIGHT=True,
        NEED_X=True, NEED_WEIGHT=True, NEED_BIAS=True, ACCUMULATE=True, ACCUMULATE_BIAS=True, SCALED=True,
        KIND=2, SMOOTHING=0.0, GAMMA_POS=1.0, GAMMA_NEG=3.5, ALPHA_POS=1.0, ALPHA_NEG=1.0, CLIP=0.05, EPS=1e-8,
        DETACH=False, FORM=1, MIRRORED=True, METRIC=(2.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0), SCALE=1.0, BETA=1.0, ETA=0.0,
        TINY=1e-38, HAS_BETA=True, HAS_ETA=True, NEED_BETA=True, NEED_ETA=True, BLOCK=configs.SLAB_BLOCK, PARTS=8,
    )  # fmt: skip
    names = function.arg_names
    if slack_class(slack) == "one":
        constants["slack"] = 1
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    aligned = {"dft_stride"} | ({"slack"} if slack_class(slack) == "aligned" else set())
    multiple = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in aligned]
    return ASTSource(function, signature, values, {(i,): [["tt.divisibility", 16]] for i in multiple})


def compile_one(job: Job) -> dict[str, object]:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from sigkernels.backends.triton import configs

    platform, arch = job.platform, job.arch
    config = configs.candidates(platform, getattr(torch, job.dtype), job.kernel, job.slack)[job.index]
    target = GPUTarget(platform, int(arch) if platform == "cuda" else arch, 32 if platform == "cuda" else 64)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    made = triton.compile(source(job.kernel, job.dtype, config, job.slack), target=target, options=options)
    report = dict(target=f"{platform}:{arch}", kernel=job.kernel, dtype=job.dtype, slack=job.slack, config=config)
    report["shared"] = made.metadata.shared
    return report | (nvidia(made.asm["ptx"]) if platform == "cuda" else amd(made.asm["amdgcn"]))


def amd(text: str) -> dict[str, object]:
    """What the compiler says of its own code. Scalar registers spill into lanes of vector registers, not into memory."""
    names = (r"\.vgpr_count", r"\.vgpr_spill_count", r"\.private_segment_fixed_size")
    registers, spills, memory = (int(re.search(rf"{name}: +(\d+)", text)[1]) for name in names)
    return dict(registers=registers, spills=spills + memory, tensor_cores="mfma" in text)


def nvidia(ptx: str) -> dict[str, object]:
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


def jobs(targets: list[str], everything: bool) -> list[Job]:
    """One compilation per class of slack: the values of a class are one kernel to Triton."""
    import torch

    from sigkernels.backends.triton import configs

    classes = {slack_class(slack): slack for slack in SLACK}
    found = []
    for target in targets:
        platform, arch = target.split(":")
        for kernel in KERNELS:
            for dtype in ("bfloat16", "float32", "float64"):
                for name, slack in classes.items():
                    count = len(configs.candidates(platform, getattr(torch, dtype), kernel, slack))
                    choices = range(count) if everything else _usual(target, kernel, dtype, name)
                    found += [Job(platform, arch, kernel, dtype, index, slack) for index in choices]
    return found


def _usual(target: str, kernel: str, dtype: str, slack: str) -> range:
    """The configurations to compile without ``--all``: an awkward slack asks most of a kernel, and a loss of a device."""
    if slack != "awkward":
        return range(kernel == "fused_loss" and dtype == "bfloat16" and target in FIRST)
    if kernel == "fused_loss":
        return range(dtype != "float64" or target in FIRST)
    return range(dtype == "bfloat16")


if __name__ == "__main__":
    wanted = jobs([a for a in sys.argv[1:] if a != "--all"], "--all" in sys.argv)
    with ProcessPoolExecutor(2) as pool:
        json.dump(list(pool.map(compile_one, wanted)), sys.stdout)
