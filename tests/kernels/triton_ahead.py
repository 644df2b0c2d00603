"""Compiles the Triton kernels for GPUs that are not here. ``triton_compiled.json`` is what became of every one.

    python -m tests.kernels.triton_ahead            # compiles what has changed since the table was written
    python -m tests.kernels.triton_ahead --write    # and writes the table
    python -m tests.kernels.triton_ahead --all      # compiles everything: about eight minutes on two cores

A compilation is a launch as the backend makes it: kernel, dtype, configuration, and the class of slack (a multiple of
16, 1, or neither) that Triton compiles apart. Its key is Triton's own, of all sources that it is made of, its constants
and its types: an entry of the table with that key is a result of these very sources.
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
}
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "tf32": "fp32", "float64": "fp64"}
HALVES = ("bfloat16", "float16")
SLACK = {"aligned": 64, "one": 1, "awkward": 50}  # one of each class
HOMES = {"fused_loss": "fused_loss", "confusion_loss": "confusion_loss", "add_slabs": "gradients"}
KERNELS = ("fused_loss", "confusion_loss", "add_slabs", "logits", "predict", "topk", "lml")
PARTS = ("dft", "plain")
LML_STEPS = 4
# What the tests compile themselves: losses, a sort, tensor cores, both makers, every class of slack.
SAMPLE = (
    "cuda:80 fused_loss bfloat16 aligned dft",
    "cuda:80 fused_loss float32 awkward dft",
    "cuda:90 confusion_loss bfloat16 awkward plain",
    "cuda:100 topk tf32 one dft",
    "cuda:90 predict float64 awkward plain",
    "cuda:80 lml float32 aligned step1",
    "hip:gfx942 fused_loss float32 awkward plain",
    "hip:gfx942 logits bfloat16 aligned dft",
)


class Job(NamedTuple):
    target: str
    kernel: str
    dtype: str
    slack: str  # the class; of the LML projection that of n
    part: str  # "dft" or "plain": with or without a DFT part; "step0" to "step3" of the LML projection
    config: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([*self[:5], "x".join(map(str, self.config))]).rstrip()


def jobs() -> Iterator[Job]:
    """Every entry of ``configs.py`` on every target, in every dtype and class of slack, with and without a DFT part."""
    from sigkernels.backends.triton import configs

    for target, kernel, dtype in itertools.product(SHARED, KERNELS, TYPES):
        platform = target.split(":")[0]
        if dtype == "tf32" and (platform == "hip" or kernel in ("add_slabs", "lml")):
            continue  # there is no tf32 on AMD, and these two multiply no matrices
        if kernel == "lml":
            for slack, step in itertools.product(("aligned", "awkward"), range(LML_STEPS)):
                yield Job(target, kernel, dtype, slack, f"step{step}")
        elif kernel == "add_slabs":
            if dtype in ("float32", "float64"):  # as slabs are
                yield Job(target, kernel, dtype, "awkward", "plain")
        else:
            for slack, part in itertools.product(SLACK, PARTS):
                kind = "16-bit" if dtype in HALVES else dtype
                for config in configs.candidates(platform, kind, kernel, SLACK[slack]):
                    yield Job(target, kernel, dtype, slack, part, config)


def source(job: Job) -> Any:
    """A launch as the backend makes it, with every option on: all gradients, weights, a fractional exponent, long lists."""
    return _lml_source(job) if job.kernel == "lml" else _tile_source(job)


def _tile_source(job: Job) -> Any:
    import triton.language as tl

    from sigkernels.backends.triton import configs

    module = importlib.import_module(f"sigkernels.backends.triton.kernels.{HOMES.get(job.kernel, 'scans')}")
    element, acc = f"*{TYPES[job.dtype]}", "*fp64" if job.dtype == "float64" else "*fp32"
    types = dict.fromkeys(("x", "dft", "weight", "bias", "out", "scratch", "grad_weight"), element)
    types |= dict.fromkeys(("row_sums", "values", "grad_beta", "grad_eta"), "*fp64")
    types |= dict.fromkeys(("u", "v", "turn", "dense", "label_weight", "label_pos_weight", "row_factor"), acc)
    types |= dict.fromkeys(("threshold", "betas", "etas", "logits", "slabs", "grad_bias", "out_scale", "scale"), acc)
    types |= dict.fromkeys(("indices", "starts"), "*i64") | dict.fromkeys(("at", "best_labels", "counts"), "*i32")
    types["best_keys"] = "*i64" if job.dtype == "float64" else "*i32"
    if job.kernel == "add_slabs":
        types["out"] = acc
    wide = tl.float64 if job.dtype == "float64" else tl.float32
    narrow = getattr(tl, job.dtype) if job.dtype in HALVES else wide
    constants = dict(
        BN=configs.TILE, M=configs.MAX_LIST, FILL=True, HAS_DFT=job.part == "dft", HAS_BIAS=True,
        DTYPE=narrow, ACC=wide, PRECISION="tf32" if job.dtype == "tf32" else "ieee",
        SPARSE=True, HAS_WEIGHT=True, HAS_POS_WEIGHT=True,
        NEED_X=True, NEED_WEIGHT=True, NEED_BIAS=True, ACCUMULATE=True, ACCUMULATE_BIAS=True, SCALED=True,
        KIND=2, SMOOTHING=0.0, GAMMA_POS=1.0, GAMMA_NEG=3.5, ALPHA_POS=1.0, ALPHA_NEG=1.0, CLIP=0.05, EPS=1e-8,
        DETACH=False, FORM=1, MIRRORED=True, METRIC=(2.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0), SCALE=1.0, BETA=1.0, ETA=0.0,
        TINY=1e-38, HAS_BETA=True, HAS_ETA=True, NEED_BETA=True, NEED_ETA=True, BLOCK=configs.SLAB_BLOCK, PARTS=8,
    )  # fmt: skip
    if job.config:
        constants |= {"BM": job.config[0], "BK": job.config[1]}
    if job.slack == "one":
        constants["slack"] = 1
    multiples = {"dft_stride"} | ({"slack"} if job.slack == "aligned" else set())
    return _ast_source(getattr(module, f"{job.kernel}_kernel"), types, constants, multiples, job.target)


def _lml_source(job: Job) -> Any:
    from sigkernels.backends.triton import lml

    types = dict.fromkeys(("z", "grad", "out"), f"*{TYPES[job.dtype]}")
    types |= dict.fromkeys(("nus", "slopes", "totals"), "*fp64")
    constants = lml.constants(int(job.part[-1]), 100_000, getattr(torch, job.dtype))
    return _ast_source(lml.lml_kernel, types, constants, {"n"} if job.slack == "aligned" else set(), job.target)


def _ast_source(kernel: Any, types: dict[str, str], constants: dict[str, Any], multiples: set[str], target: str) -> Any:
    """``multiples``: the integers that are multiples of 16, as all pointers are."""
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


def options(job: Job) -> dict[str, int]:
    from sigkernels.backends.triton import configs, lml

    if job.kernel == "lml":
        return lml.options(job.target.split(":")[0])
    if job.kernel == "add_slabs":
        return {}
    chosen = configs.Config(*job.config).options()
    return {name: value for name, value in chosen.items() if name not in ("BM", "BK")}


def key(job: Job) -> str:
    """Changes when the compilation does: with the kernel's source, its constants, its types."""
    return hashlib.sha256(f"{source(job).hash()} {options(job)}".encode()).hexdigest()[:16]


def compile_one(job: Job) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    platform, arch = job.target.split(":")
    target = GPUTarget(platform, int(arch) if platform == "cuda" else arch, 32 if platform == "cuda" else 64)
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
        triton.knobs.cache.dir = cache  # a kernel from a cache comes without what ptxas said of it
        triton.knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(told):
            made = triton.compile(source(job), target=target, options=options(job))
    report = {"key": key(job), "shared": made.metadata.shared}
    return report | (nvidia(told.getvalue(), made.asm["ptx"]) if platform == "cuda" else amd(made.asm["amdgcn"]))


def nvidia(told: str, ptx: str) -> dict[str, Any]:
    """What ptxas said when Triton called it: with Triton's own options, of the code that a launch would load."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", told)]
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", told)
    assert registers and memory, told
    cores = bool(re.search(r"mma\.sync|wgmma|tcgen05\.mma", ptx))
    return dict(registers=max(registers), spills=sum(int(n) for counts in memory for n in counts), tensor_cores=cores)


def amd(text: str) -> dict[str, Any]:
    """What the compiler says of its own code. Scalar registers spill into lanes of vector registers, not into memory."""
    names = (r"\.vgpr_count", r"\.vgpr_spill_count", r"\.private_segment_fixed_size")
    registers, spills, memory = (int(re.search(rf"{name}: +(\d+)", text)[1]) for name in names)  # type: ignore[index]
    return dict(registers=registers, spills=spills + memory, tensor_cores="mfma" in text)


def wrong(name: str, report: dict[str, Any]) -> str | None:
    """What a compilation must not be."""
    target, kernel, dtype = name.split()[:3]
    if report["spills"]:
        return f"{name} spills: {report}"
    if report["shared"] > SHARED[target]:
        return f"{name} has more shared memory than the {SHARED[target]} bytes of a block: {report}"
    if dtype in (*HALVES, "tf32") and kernel not in ("add_slabs", "lml") and not report["tensor_cores"]:
        return f"{name} does not use the tensor cores: {report}"
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
        few = [job for job in every if " ".join(job[:5]) in SAMPLE]
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
