"""Predicted times of a step of the library path: nothing here has been run on a GPU.

    python bench/predict_library.py [--dtype bf16 tf32] [--machine A100 H100 4090]

Needs ``gpumodel`` on the path, a model of a multiprocessor that is no part of this package. It walks the machine code of the
pointwise kernel, counts 2 µs for every launch, and models the vendor's products; its own error is 15 to 30 %.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any, NamedTuple

import torch

from sigkernels.backends.library_walk import _L2_SHARE, _LEAST_L2, _up
from sigkernels.backends.triton import configs
from sigkernels.backends.triton.kernels.elementwise import elementwise_kernel, row_totals_kernel

try:
    from gpumodel import baselines, machines, report, sass
    from gpumodel.ahead import triton_cubin
except ImportError as error:
    raise SystemExit(f"bench/predict_library.py: {error}; it needs gpumodel, a model of a GPU, on PYTHONPATH") from None

CASES = [(8_921, 80, 500, 64), (8_921, 80, 500, 256), (131_072, -1, 768, 1024), (20_000, 50, 100, 64),
         (20_000, 50, 100, 256), (8_921, 80, 50, 64), (8_921, 80, 50, 256), (100_000, 50, 64, 256)]  # fmt: skip
POINTERS = dict.fromkeys(("z", "label_weight", "label_pos_weight", "row_scale", "row_sums", "value"), "*fp32")
POINTERS |= dict.fromkeys(("indices", "offsets", "unknown"), "*i64") | {"rows": "*fp64"}
NUMBERS = dict.fromkeys(("constant", "scale", "scale_low"), "fp32")
# A program finds its positives in three steps, and has one: a row of five has far fewer than that in a program's tiles
# where labels are many. Single numbers are a sector of L2.
WALK = {
    "memory": [{"at": r"tl\.load\(indices|tl\.load\(offsets|tl\.load\(features|sums", "l2_bytes": 32, "lsu": 2}],
    "loops": [
        {"at": r"while tl\.max\(high", "trips": 3},
        {"at": r"while tl\.min\(place", "trips": 1},
        {"at": r"for tile in range", "trips": "each", "name": "tile"},
    ],
    "branches": [
        {"at": r"if last >= labels", "take": True},
        {"at": r"while tl\.min\(place", "take": "tile > 0"},
        {"at": r"while tl|below = open_|for tile in range", "take": False},
    ],
}
ADDS = {"loops": [{"at": r"for first in range", "trips": "passes"}], "branches": []}


class Step(NamedTuple):
    """Seconds of the parts of a step, and how many launches they are."""

    products: float
    pointwise: float
    rest: float
    launches: int
    chunks: int

    @property
    def seconds(self) -> float:
        return self.products + self.pointwise + self.rest


@functools.cache
def _compiled(kernel: Any, dtype: str, **constants: Any) -> tuple[Any, int, int]:
    """Machine code, registers and bytes of shared memory of a pointwise kernel."""
    element = {"bf16": "*bf16", "tf32": "*fp32"}[dtype]
    types = {n: POINTERS.get(n) or NUMBERS.get(n) for n in kernel.arg_names if not n.isupper()}
    types |= {n: element for n in ("g", "features", "bias", "dense") if n in types}
    types = {name: kind or "i32" for name, kind in types.items()}
    odd = tuple(n for n, kind in types.items() if not kind.startswith("*") and n != "stride")
    warps = constants.pop("num_warps")
    cubin, shared = triton_cubin(kernel, types, constants, warps, 1, odd=odd)
    name = kernel.fn.__name__
    return sass.load(cubin, f"^{name}$"), sass.registers(cubin)[name], shared


def _elementwise(m: Any, dtype: str, rows: int, labels: int) -> float:
    config = configs.elementwise(torch.float32)
    options = config.options("hip")  # without a limit of registers
    function, registers, shared = _compiled(
        elementwise_kernel, dtype, BIAS=False, APART=True, SPARSE=True, UNKNOWN=False, LABEL_WEIGHT=False,
        LABEL_POS_WEIGHT=False, WEIGHT=1.0, POS_WEIGHT=1.0, ROW_SCALE=False, GRADIENT=True, KIND=0, SMOOTHING=0.0,
        GAMMA_POS=0.0, GAMMA_NEG=0.0, ALPHA_POS=1.0, ALPHA_NEG=1.0, CLIP=0.0, EPS=1e-8, DETACH=False,
        ROUGH=dtype == "bf16", INTERPRETED=False, **options,
    )  # fmt: skip
    blocks = -(-rows // config.BM)
    parts, each = configs.parts(-(-labels // config.BN), blocks)
    known = dict(warps=config.num_warps, tiles=parts * blocks, registers=registers, shared=shared, each=each)
    return report.predict(function, WALK, m, **known).seconds + baselines.LAUNCH


def _row_totals(m: Any, rows: int, parts: int) -> float:
    block = min(max(1 << (rows - 1).bit_length(), configs.ROWS_AT_LEAST), configs.ROWS_AT_ONCE)
    options = configs.row_totals(block)
    function, registers, shared = _compiled(row_totals_kernel, "tf32", TOTAL=True, **options)
    known = dict(warps=options["num_warps"], tiles=1, registers=registers, shared=shared)
    return report.predict(function, ADDS, m, passes=-(-parts // options["PARTS"]), **known).seconds + baselines.LAUNCH


def step(m: Any, dtype: str, n: int, k: int, s: int, rows: int) -> Step:
    """BCE of label sets, the gradients of x and weight, and the launch that reads the upstream gradient."""
    size = 2 if dtype == "bf16" else 4
    labels = int(_L2_SHARE * max(m.l2_mib * 2**20, _LEAST_L2)) // 4 // rows
    chunks = -(-n // max(labels, 128))
    labels = min(_up(-(-n // chunks), 128), n)
    rank = 0 if k < 0 else 2 * k if chunks == 1 else min(2 * k, int(2 * k * labels / n) + 8)
    # The columns of the DFT come from memory where they are those of all labels; the factor of many chunks stays in L2.
    basis = labels * rank * size if chunks == 1 else 0
    product = functools.partial(baselines.product, m, dtype)
    weight = labels * s * size
    products = product(rows, labels, s, weight) + product(rows, s, labels, weight, split=True)
    products += product(labels, s, rows, weight)
    launches = 4
    if k >= 0:
        products += product(rows, labels, rank, basis) + product(rows, rank, labels, basis, split=True)
        launches += 2
    whole, once = chunks * products, 2 * baselines.LAUNCH  # of the rows' sums, below, and the upstream gradient
    if chunks > 1:
        once += 2 * baselines.LAUNCH  # zeros for grad_x, and its dtype
        if k >= 0:
            whole += 2 * product(rows, chunks * rank, 2 * k, chunks * rank * 2 * k * size)
    config = configs.elementwise(torch.float32)
    parts, _ = configs.parts(-(-labels // config.BN), -(-rows // config.BM))
    rest = _row_totals(m, rows, parts) + once - baselines.LAUNCH
    count = chunks * launches + 2 + (0 if chunks == 1 else 2 + 2 * (k >= 0))
    return Step(whole, chunks * _elementwise(m, dtype, rows, labels), rest, count, chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", nargs="*", default=["bf16", "tf32"], choices=("bf16", "tf32"))
    parser.add_argument("--machine", nargs="*", default=list(machines.MACHINES), choices=list(machines.MACHINES))
    a = parser.parse_args()
    print("| case | dtype | machine | µs | products | pointwise | launches | chunks | / compiled | / eager |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for n, k, s, rows in CASES:
        for dtype in a.dtype:
            for m in (machines.MACHINES[name] for name in a.machine):
                ours, theirs = step(m, dtype, n, k, s, rows), baselines.baselines(m, dtype, n, k, s, rows)
                times = (f"{1e6 * t:.1f}" for t in (ours.seconds, ours.products, ours.pointwise))
                ratios = (f"{ours.seconds / t:.2f}" for t in (theirs.compiled, theirs.eager))
                case = f"n={n} k={k} s={s} B={rows}"
                print("|", " | ".join([case, dtype, m.name, *times, f"{ours.launches} | {ours.chunks}", *ratios]), "|")


if __name__ == "__main__":
    main()
