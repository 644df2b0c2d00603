"""Compiles the Triton kernels for GPUs that are not here. ``triton_compiled.json`` is what became of every one.

    python -m tests.kernels.triton_ahead            # compiles what has changed since the table was written
    python -m tests.kernels.triton_ahead --write    # and writes the table
    python -m tests.kernels.triton_ahead --all      # compiles everything: some minutes on two cores

A compilation is a launch as the backend makes it: kernel, dtype, and a variant of its settings. Its key is Triton's own,
of all sources that it is made of, its constants and its types: an entry of the table with that key is a result of these
very sources.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

TABLE = Path(__file__).with_name("triton_compiled.json")
# Bytes of shared memory that a block may have; the compiler does not check it.
SHARED = {
    "cuda:80": 163 * 1024,
    "cuda:90": 227 * 1024,
    "cuda:100": 227 * 1024,
    "cuda:120": 99 * 1024,
    "hip:gfx942": 64 * 1024,
    "hip:gfx1100": 64 * 1024,
}
REGISTERS = 65536
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
VARIANTS = {
    "elementwise": ("sparse", "dense", "products"),  # the last leaves the DFT part to products
    "finish": ("total", "rows"),
    "columns": (
        "sparse",
        "dense",
        "dense256",
        "dense1024",
        "many",
    ),  # with 64 rows, so many, more than a program has at once
    "mark": ("all",),
    "topk": ("short", "long"),
    "scale": ("all",),
    "lml": ("step0", "step1", "step2", "step3"),
}
# What the tests compile themselves: one of each kernel, both makers.
SAMPLE = (
    "cuda:80 elementwise bfloat16 sparse",
    "cuda:90 elementwise float32 dense",
    "cuda:80 columns float32 dense",
    "cuda:120 topk bfloat16 short",
    "cuda:80 lml float32 step1",
    "hip:gfx942 elementwise float16 sparse",
    "hip:gfx1100 finish bfloat16 total",
)


class Job(NamedTuple):
    target: str
    kernel: str
    dtype: str  # of x
    variant: str

    @property
    def name(self) -> str:
        return " ".join(self)


class Launch(NamedTuple):
    """A launch as the backend makes it."""

    kernel: Any
    types: dict[str, str]  # of pointers; everything else is an int32
    constants: dict[str, Any]
    multiples: set[str]  # integers that are multiples of 16, as all pointers are
    options: dict[str, Any]


def jobs() -> Iterator[Job]:
    """Every kernel on every target, in every dtype and variant."""
    for target, (kernel, variants), dtype in itertools.product(SHARED, VARIANTS.items(), TYPES):
        for variant in variants:
            yield Job(target, kernel, dtype, variant)


def launch(job: Job) -> Launch:
    """With every option of the variant on: sparse targets as most calls have them, dense ones with all settings."""
    return {"lml": _lml, "mark": _mark, "scale": _scale}.get(job.kernel, _pointwise)(job)


def _pointwise(job: Job) -> Launch:
    from sigkernels.backends.triton import configs

    home = "elementwise" if job.kernel == "finish" else job.kernel
    module = importlib.import_module(f"sigkernels.backends.triton.kernels.{home}")
    element, acc = f"*{TYPES[job.dtype]}", "*fp64" if job.dtype == "float64" else "*fp32"
    types = dict.fromkeys(("g", "features", "bias", "waves", "coef", "narrow"), element)
    types |= dict.fromkeys(("z", "label_weight", "label_pos_weight", "row_scale", "losses", "wide"), acc)
    types |= dict.fromkeys(("betas", "etas", "column_sums", "value"), acc)
    types |= dict.fromkeys(("pooled", "sums", "values", "grad_beta", "grad_eta", "rows"), "*fp64")
    types |= dict.fromkeys(("indices", "offsets", "best_labels"), "*i64") | dict.fromkeys(("unknown", "dense"), "*u8")
    types |= dict.fromkeys(("constant", "scale", "scale_low"), "fp32")
    types["marks"] = "*i32"
    types["best_keys"] = "*i64" if job.dtype == "float64" else "*i32"
    rich, cuda = job.variant.startswith("dense"), job.target.startswith("cuda")
    waves = job.variant != "products" and (job.dtype in ("bfloat16", "float16") or (cuda and job.dtype == "float32"))
    constants = dict(
        BIAS=rich, APART=job.dtype in ("bfloat16", "float16"), WAVES=waves, GRAD_WAVES=waves,
        SPARSE=not rich, INTERPRETED=False,
        UNKNOWN=rich, LABEL_WEIGHT=rich, LABEL_POS_WEIGHT=rich, WEIGHT=1.0, POS_WEIGHT=1.0, ROW_SCALE=rich, GRADIENT=True,
        KIND=2 if rich else 0, SMOOTHING=0.0, GAMMA_POS=1.0, GAMMA_NEG=3.5 if rich else 0.0, ALPHA_POS=1.0, ALPHA_NEG=1.0,
        CLIP=0.05, EPS=1e-8, DETACH=False, ROUGH=job.dtype == "bfloat16",
        FORM=1, MIRRORED=True, METRIC=(2.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0), BETA=1.0, ETA=0.0, TINY=1e-38,
        HAS_BETA=rich, HAS_ETA=rich, POOLED=False, SUMS=True, SLOPES=True, COLUMN_SUMS=rich, NEED_BETA=rich, NEED_ETA=rich,
        M=configs.MAX_LIST if job.variant == "long" else 8, TOTAL=job.variant == "total",
        CONVERT=job.dtype == "bfloat16",
    )  # fmt: skip
    if job.kernel == "finish":
        constants |= configs.FINISH
        options: dict[str, Any] = {"num_warps": constants.pop("num_warps")}
    else:
        dtype = getattr(torch, job.dtype)
        rows = {"dense256": 256, "dense1024": 1024, "many": 2048}.get(job.variant, 64)
        chosen = {
            "elementwise": configs.elementwise(dtype),
            "columns": configs.columns(dtype, rows),
            "topk": configs.TOPK,
        }
        options = chosen[job.kernel].options(job.target.split(":")[0])
        constants |= {name: options.pop(name) for name in ("BM", "BN")}
        if job.kernel == "columns":
            options["enable_fp_fusion"] = False
            constants["ONCE"] = rows <= constants["BM"]
    return Launch(getattr(module, f"{job.kernel}_kernel"), types, constants, {"stride", "coef_stride"}, options)


def _mark(job: Job) -> Launch:
    from sigkernels.backends.triton import configs
    from sigkernels.backends.triton.kernels import targets

    types = {"indices": "*i64", "offsets": "*i64", "marks": "*i32"}
    return Launch(targets.mark_kernel, types, dict(configs.MARKS), set(), {})


def _scale(job: Job) -> Launch:
    from sigkernels.backends.triton import scale

    types = dict.fromkeys(("a", "b", "c", "factor"), f"*{TYPES[job.dtype]}")
    return Launch(scale.scale_kernel, types, {"BLOCK": scale.BLOCK}, set(), {})


def _lml(job: Job) -> Launch:
    from sigkernels.backends.triton import lml

    types = dict.fromkeys(("z", "grad", "out"), f"*{TYPES[job.dtype]}")
    types |= dict.fromkeys(("nus", "slopes", "totals"), "*fp64")
    constants = lml.constants(int(job.variant[-1]), 100_000, getattr(torch, job.dtype))
    return Launch(lml.lml_kernel, types, constants, {"n"}, dict(lml.options(job.target.split(":")[0])))


def source(job: Job) -> Any:
    made = launch(job)
    return _ast_source(made.kernel, made.types, made.constants, made.multiples, job.target)


def _ast_source(kernel: Any, types: dict[str, str], constants: dict[str, Any], multiples: set[str], target: str) -> Any:
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, name in enumerate(names):
        if signature[name].startswith("*"):
            attributes[i,] = [["tt.divisibility", 16]]
            if target.startswith("hip"):  # a tensor of less than 2 GB, which AMD's backend addresses in another way
                attributes[i,].append(["tt.pointer_range", 32])
        elif name in multiples and name not in constants:
            attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, values, attributes)


def key(job: Job) -> str:
    """Changes when the compilation does: with the kernel's source, its constants, its types."""
    return hashlib.sha256(f"{source(job).hash()} {launch(job).options}".encode()).hexdigest()[:16]


def compile_one(job: Job) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    platform, arch = job.target.split(":")
    target = GPUTarget(platform, int(arch) if platform == "cuda" else arch, 64 if arch.startswith("gfx9") else 32)
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
        triton.knobs.cache.dir = cache  # a kernel from a cache comes without what ptxas said of it
        triton.knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(told):
            made = triton.compile(source(job), target=target, options=launch(job).options)
    report = {"key": key(job), "shared": made.metadata.shared}
    return report | (nvidia(told.getvalue()) if platform == "cuda" else amd(made.asm["amdgcn"]))


def nvidia(told: str) -> dict[str, Any]:
    """What ptxas said when Triton called it: with Triton's own options, of the code that a launch would load."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", told)]
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", told)
    assert registers and memory, told
    return dict(registers=max(registers), spills=sum(int(n) for counts in memory for n in counts))


def amd(text: str) -> dict[str, Any]:
    """What the compiler says of its own code. Scalar registers spill into lanes of vector registers, not into memory."""
    names = (r"\.vgpr_count", r"\.vgpr_spill_count", r"\.private_segment_fixed_size")
    registers, spills, memory = (int(re.search(rf"{name}: +(\d+)", text)[1]) for name in names)  # type: ignore[index]
    return dict(registers=registers, spills=spills + memory)


def wrong(name: str, report: dict[str, Any]) -> str | None:
    """What a compilation must not be."""
    job = Job(*name.split())
    target, warps = job.target, launch(job).options.get("num_warps", 4)
    if target.startswith("cuda") and warps * 32 * report["registers"] > REGISTERS:
        return f"{name} has more than the {REGISTERS} registers of a multiprocessor with its {warps} warps: {report}"
    if report["spills"]:
        return f"{name} spills: {report}"
    if report["shared"] > SHARED[target]:
        return f"{name} has more shared memory than the {SHARED[target]} bytes of a block: {report}"
    return None


def compile_all(wanted: list[Job]) -> Iterator[tuple[str, dict[str, Any]]]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for i, (job, report) in enumerate(zip(wanted, pool.map(compile_one, wanted), strict=True), 1):
            print(f"{i}/{len(wanted)} {job.name} {report}", file=sys.stderr, flush=True)
            yield job.name, report


def write(entries: dict[str, dict[str, Any] | None]) -> None:
    """What there is so far, one line per entry, so that a difference can be read."""
    import triton

    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(report)}" for name, report in entries.items() if report)
    TABLE.write_text(f'{{\n  "triton": "{triton.__version__}",\n  "entries": {{\n{lines}\n  }}\n}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="compile also what has not changed")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--sample", action="store_true", help="print all keys and a few compilations as JSON")
    arguments = parser.parse_args()
    every = list(jobs())
    if arguments.sample:
        few = [job for job in every if job.name in SAMPLE]
        json.dump({"keys": {job.name: key(job) for job in every}, "compiled": dict(compile_all(few))}, sys.stdout)
        return 0
    import triton

    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"triton": None, "entries": {}}
    known = table["entries"] if table["triton"] == triton.__version__ and not arguments.all else {}
    changed = [job for job in every if known.get(job.name, {}).get("key") != key(job)]
    entries = {job.name: known.get(job.name) for job in every}
    for name, report in compile_all(changed):
        entries[name] = report
        if arguments.write:  # at once, so that an interrupted run need not begin again
            write(entries)
    if arguments.write:
        write(entries)
    found = [text for text in (wrong(name, report) for name, report in entries.items()) if text]
    print(*found, f"{len(changed)} of {len(entries)} compiled, {len(found)} wrong", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
