"""Compilers for the kernel tests: found or skipped, run two at a time, and their results kept by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SHIM = Path(__file__).parent / "shim"
KERNELS = ("fused_loss", "finish", "devices")
ENVIRONMENT = dict(os.environ)
over = threading.Event()  # nobody waits for compilers any more


def need(tool: str) -> str:
    """The path of a tool, or a skip that names it."""
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed")
    return found


def run(command: Sequence[str | Path], **kwargs) -> subprocess.CompletedProcess[str]:
    """In the environment that the session began with: another test may have set variables of its own meanwhile."""
    if over.is_set():
        raise RuntimeError("the session is over")
    options = {"env": ENVIRONMENT, "cwd": ROOT} | kwargs
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def must(command: Sequence[str | Path], **kwargs) -> subprocess.CompletedProcess[str]:
    """Runs a command that has to succeed; its output is the message when it does not."""
    done = run(command, **kwargs)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done


def all_of(commands: Sequence[Sequence[str | Path]]) -> list[subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(must, commands))


def fingerprint(*extra: str, folders: Sequence[Path] = (CSRC / "cuda", CSRC / "core", SHIM)) -> str:
    """Changes when a source, or what is done with it (``extra``), changes."""
    digest = hashlib.sha256("\0".join(extra).encode())
    for folder in folders:
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_host(out: Path, flags: Sequence[str], csrc: Path = CSRC, shim_flags: Sequence[str] = ()) -> list[Path]:
    """The kernels' own ``.cu`` files and the shim as host objects."""
    gxx = need("g++")
    base = [gxx, "-std=c++17", "-fPIC", "-Wno-unknown-pragmas", f"-I{SHIM}", f"-I{csrc}", f"-I{csrc / 'cuda'}"]
    kernel = [*base, "-Wall", "-Wextra", "-Werror", "-DSIGKERNELS_HOST_SHIM", *flags, "-x", "c++", "-c"]
    objects = [out / f"{name}.o" for name in KERNELS]
    commands = [[*kernel, csrc / "cuda" / f"{o.stem}.cu", "-o", o] for o in objects]
    commands.append([*base, "-O2", *shim_flags, "-c", SHIM / "cuda_shim.cpp", "-o", out / "cuda_shim.o"])
    all_of(commands)
    return [*objects, out / "cuda_shim.o"]


def bindings(cache: Path) -> Path:
    """``bindings.cpp`` as an object: it knows addresses and sizes only, so the shim and the GPU share it."""
    pybind11 = pytest.importorskip("pybind11")
    made = cache / f"bindings-{fingerprint(sys.version)}.o"
    if not made.exists():
        include = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}", f"-I{CSRC}"]
        unfinished = made.with_suffix(".unfinished.o")
        compiler = [need("g++"), "-std=c++17", "-O0", "-fPIC", *include]
        must([*compiler, "-c", CSRC / "cuda" / "bindings.cpp", "-o", unfinished])
        unfinished.rename(made)
    return made


def host_module(cache: Path) -> Path:
    """``_cuda`` built against the shim: the same bindings and launchers, on host memory."""
    out = cache / f"host-{fingerprint(sys.version)}"
    module = out / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not module.exists():
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(1) as beside:
            bound = beside.submit(bindings, cache)
            objects = compile_host(out, ["-O1"])
        unfinished = out / "unfinished.so"
        must([need("g++"), "-shared", *objects, bound.result(), "-o", unfinished])
        unfinished.rename(module)
    return module
