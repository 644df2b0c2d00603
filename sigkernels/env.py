"""``sigkernels env``: what is installed, what was compiled and how, and which backends can run here and why."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from . import __version__, machine_load
from .backends import missing_kernels
from .cli import add_command

PACKAGES = ("torch", "numpy", "scipy", "triton", "cupy-cuda12x", "cupy-cuda13x", "pybind11")
ISA_FEATURES = ("avx512_bf16", "avx512bw", "avx512f", "fma", "f16c", "avx2", "asimd", "sve")
TYPICAL_SHAPES: tuple[tuple[Any, int, int, int], ...] = (  # product, slack, rows, labels
    ("16-bit", 64, 64, 9_000),
    ("16-bit", 128, 256, 20_000),
    ("16-bit", 64, 256, 100_000),
    ("tf32", 64, 256, 100_000),
    ("16-bit", 64, 256, 1_000_000),
)
EXTENSIONS = {
    "sigkernels._C": f"the CPU kernels: {missing_kernels.REMEDY}",
    "sigkernels._cuda": "the CUDA kernels: SIGKERNELS_CUDA=1 pip install . in the source tree, where nvcc is",
}


def collect() -> dict[str, Any]:
    """Everything ``sigkernels env`` shows, as plain data (JSON-able)."""
    import torch

    import sigkernels as sk

    return {
        "sigkernels": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "threads": {
            "torch": torch.get_num_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
            "cores": machine_load.usable_cores(),
        },
        "extensions": {name: _extension(name) for name in EXTENSIONS},
        "backends": sk.backend_status(),
        "forced_backend": os.environ.get("SIGKERNELS_BACKEND"),
        "forced_isa": os.environ.get("SIGKERNELS_ISA"),
        "gpus": _gpus(),
    }


def summary(info: dict[str, Any]) -> dict[str, Any]:
    """The part of ``collect()`` that a reader needs to judge a number; the rest only concerns its machine."""
    return {key: info[key] for key in ("sigkernels", "packages", "cpu", "threads")}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    """Model and the instruction sets that matter here; from /proc/cpuinfo, so empty where there is none."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "isa": [name for name in ISA_FEATURES if name in flags],
    }


def _extension(name: str) -> dict[str, Any]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        return {"built": not missing, "why": f"not built ({EXTENSIONS[name]})" if missing else str(error)}
    # _cuda is built only on request and has no more to tell than that it is there.
    info = module.build_info() if hasattr(module, "build_info") else {}
    return {"built": True, "why": None, "file": Path(str(module.__file__)).name, **info}


def _gpus() -> dict[str, Any]:
    import torch

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory_gib": round(properties.total_memory / 2**30, 1),
                    **_paths(torch.device("cuda", index)),
                }
            )
        return {"devices": devices, "why": None}
    built_for = torch.version.cuda or getattr(torch.version, "hip", None)
    why = "torch sees no GPU or no driver" if built_for else f"torch {torch.__version__} is a CPU build"
    return {"devices": devices, "why": why}


def _paths(device: Any) -> dict[str, Any]:
    """What ``auto`` takes on this device for a few shapes (docs/gpu.md)."""
    from . import backends
    from .backends import gpu_paths

    kind = gpu_paths.architecture(device)
    try:
        choices = {
            str(shape): gpu_paths.choose_for_class(kind, shape, backends.gpu_paths_here())._asdict()
            for shape in (gpu_paths.ShapeClass(*shape) for shape in TYPICAL_SHAPES)
        }
    except backends.BackendError as error:
        return {"paths_as": kind, "paths": {}, "paths_refused": str(error)}
    return {"paths_as": kind, "paths": choices, "paths_refused": None}


def _waiting(policy: str | None) -> str:
    """How OpenMP threads wait for each other, and what that does on a busy machine."""
    if policy is not None and policy.strip().lower() == "passive":
        return "OMP_WAIT_POLICY=passive: waiting threads sleep; right on a busy machine, a little slower on an idle one"
    setting = f"OMP_WAIT_POLICY={policy}" if policy else "OMP_WAIT_POLICY is not set"
    return f"{setting}: waiting threads spin; on a busy machine that is many times slower: set OMP_WAIT_POLICY=passive"


def _forced(name: str, backends: dict[str, str | None]) -> str:
    supported = ("auto", *backends)
    if name not in supported:
        return f"SIGKERNELS_BACKEND={name} is unsupported: every call will fail; use one of {', '.join(supported)}"
    if backends.get(name) is not None:
        return f"SIGKERNELS_BACKEND={name} is not available: every call will fail"
    return f"SIGKERNELS_BACKEND={name}"


def _refused(reason: str | None) -> str:
    return f"; every loss will fail: {reason}" if reason else ""


def render(info: dict[str, Any]) -> str:
    """``collect()`` for people."""
    lines = [f"sigkernels {info['sigkernels']}"]

    def line(name: str, text: object) -> None:
        lines.append(f"  {name:<12} {text}")

    line("python", f"{info['python']} on {info['platform']}")
    line("packages", ", ".join(f"{name} {version}" for name, version in info["packages"].items() if version))
    line("processor", f"{info['cpu']['model']} ({' '.join(info['cpu']['isa']) or 'instruction sets unknown'})")
    threads = info["threads"]
    omp = f", OMP_NUM_THREADS={threads['OMP_NUM_THREADS']}" if threads["OMP_NUM_THREADS"] else ""
    line("threads", f"{threads['torch']} (torch) on {threads['cores']} usable cores{omp}")
    line("waiting", _waiting(threads["OMP_WAIT_POLICY"]))
    for gpu in info["gpus"]["devices"]:
        line("gpu", f"{gpu['name']}, compute {gpu['capability']}, {gpu['memory_gib']} GiB")
        lines.append(f"      losses go by the times of '{gpu['paths_as']}' devices{_refused(gpu['paths_refused'])}")
        lines += [f"      {shape}: {choice['path']}; {choice['reason']}" for shape, choice in gpu["paths"].items()]
    if not info["gpus"]["devices"]:
        line("gpu", f"none: {info['gpus']['why']}")
    lines.append("extensions")
    for name, extension in info["extensions"].items():
        line(name.partition(".")[2], extension["why"] or extension["file"])
        for key, value in extension.items():
            if key not in ("built", "why", "file"):
                text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
                lines.append(f"      {key:<14} {text}")
    lines.append("backends")
    for name, why_not in info["backends"].items():
        line(name, f"not available: {why_not}" if why_not else "available")
    if info["forced_backend"]:
        line("forced", _forced(info["forced_backend"], info["backends"]))
    if info["forced_isa"]:
        usable = info["extensions"]["sigkernels._C"].get("isas_usable", ())
        wrong = info["backends"]["cpu"] is None and info["forced_isa"] not in usable
        fails = f" is not usable here: every call of the cpu backend will fail; use one of {', '.join(usable)}"
        line("forced", f"SIGKERNELS_ISA={info['forced_isa']}{fails if wrong else ''}")
    return "\n".join(lines)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    add_command(
        subparsers,
        "env",
        help="versions, compiled extensions, backends and why each can or cannot run here",
        description="Shows versions, the compiled extensions with their flags and instruction sets, the backends "
        "with the reason where one is not available, threads and GPUs. Paste it into a bug report.",
    )


def run(args: argparse.Namespace) -> int:
    info = collect()
    print(json.dumps(info, indent=2) if args.json else render(info))
    return 0
