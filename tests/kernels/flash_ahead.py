"""Compiles the flash kernel in Triton for GPUs that are not here, and prints what became of it as JSON.

python -m tests.kernels.flash_ahead [--all]     # without --all a sample
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import sys
import tempfile
import warnings
from typing import Any

import torch

TARGETS = {"cuda:80": 163, "cuda:90": 227, "cuda:100": 227, "cuda:120": 99}  # KiB of shared memory of a block
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# What a training step needs, the same with bias and a factor for each row, and the losses that are not plain.
VARIANTS = ("step", "bias", "general")
SAMPLE = (
    ("cuda:80", "bfloat16", "step", 64),
    ("cuda:80", "bfloat16", "step", 256),
    ("cuda:80", "float32", "step", 256),
    ("cuda:80", "bfloat16", "general", 64),
    ("cuda:90", "bfloat16", "step", 128),
    ("cuda:90", "float16", "bias", 64),
    ("cuda:100", "bfloat16", "step", 256),
    ("cuda:120", "float16", "step", 128),
)
Job = tuple[str, str, str, int]


def jobs() -> list[Job]:
    from sigkernels.backends.triton import flash

    made = []
    for target, dtype, variant in itertools.product(TARGETS, TYPES, VARIANTS):
        shapes = flash.SHAPES.get((kind(dtype), variant != "general"), ())
        made += [(target, dtype, variant, shape.BM) for shape in shapes if shape.shared <= TARGETS[target] * 1024]
    return made


def kind(dtype: str) -> str:
    return "tf32" if dtype == "float32" else "16-bit"


def source(dtype: str, variant: str, chosen: Any, slack: int = 64) -> Any:
    """A launch as the backend makes it."""
    from triton.compiler import ASTSource

    from sigkernels.backends.triton import flash
    from sigkernels.backends.triton.kernels.flash import flash_kernel
    from sigkernels.losses import BCE, Asymmetric

    element, rich, general = f"*{TYPES[dtype]}", variant != "step", variant == "general"
    types = dict.fromkeys(
        ("x", "weight", "bias", "basis", "coef", "dense", "grad_weight", "grad_bias", "grad_coef"), element
    )
    types |= dict.fromkeys(("label_weight", "pos_weight", "row_factor", "out_scale", "slabs", "row_sums"), "*fp32")
    types |= {"marks": "*i32", "indices": "*i64", "offsets": "*i64", "totals": "*fp64", "scale": "fp32"}
    params = (Asymmetric(3.5) if general else BCE()).kernel_params()
    assert params is not None
    constants = flash._keywords(
        chosen, params._replace(weight=None, pos_weight=None), slack, getattr(torch, dtype), dft=True, bias=rich, sparse=True,
        label_weight=general, pos_weight=general, row_factor=rich, scaled=rich, accumulate=False, need_x=True,
        need_weight=True, need_bias=rich,
    )  # fmt: skip
    constants = {name: value for name, value in constants.items() if name.isupper()}
    names = flash_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name == "coef_stride"
    }
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    return ASTSource(flash_kernel, signature, values, attributes)


def compile_one(job: Job) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    from sigkernels.backends.triton import flash

    target, dtype, variant, rows = job
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    chosen = flash.shape(kind(dtype), 64, rows, variant != "general")
    options = {name: value for name, value in flash.layout(chosen).items() if not name.isupper()}
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
        triton.knobs.cache.dir = cache  # a kernel from a cache comes without what ptxas said of it
        triton.knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(told):
            gpu = GPUTarget("cuda", int(target.split(":")[1]), 32)
            made = triton.compile(source(dtype, variant, chosen), target=gpu, options=options)
    stores = re.findall(r"(\d+) bytes spill stores", told.getvalue())
    return {
        "spilled": max(map(int, stores)),  # bytes of a thread
        "shared": made.metadata.shared,
        "tensor_cores": bool(re.search(r"mma\.sync|wgmma|tcgen05\.mma", made.asm["ptx"])),
    }


def main() -> None:
    assert not torch.version.hip
    wanted = jobs() if "--all" in sys.argv[1:] else list(SAMPLE)
    print(json.dumps({" ".join(map(str, job)): compile_one(job) for job in wanted}, indent=1))


if __name__ == "__main__":
    main()
