"""The CUDA kernels through nvcc for real architectures: no warning, no spill, ceilings, tensor-core instructions.

And the extension: linked with the static runtime, imported and asked to launch on a machine without a driver.
"""

from __future__ import annotations

import ctypes
import re
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .ptxas import dtype_of, usages
from .toolchain import CSRC, KERNELS, bindings, fingerprint, must, need, run

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
LINKED = "sm_80"  # the architecture of the extension that is linked below
DTYPES = ("bfloat16", "float16", "tf32")
SHAPES = {"bfloat16": 7, "float16": 7, "tf32": 6}  # of a block of fused_loss


def compile_one(cache: Path, kernel: str, arch: str) -> Path:
    """One ``.cu`` for one architecture; what ptxas said lies beside it. An object where the extension needs one, else
    the device's code alone."""
    out = cache / f"nvcc-{fingerprint(folders=(CSRC / 'cuda', CSRC / 'core'))}"
    out.mkdir(parents=True, exist_ok=True)
    kind, what = ("o", "-c") if arch == LINKED else ("cubin", "-cubin")
    result = out / f"{kernel}.{arch}.{kind}"
    if not result.exists():
        command = [need("nvcc"), "-std=c++17", "-O3", f"-I{CSRC}", f"-arch={arch}", "-Werror", "all-warnings"]
        command += ["-Xptxas", "-v,-warn-spills,-Werror", "-Xcompiler", "-fPIC", what]
        unfinished = out / f"{kernel}.{arch}.unfinished.{kind}"
        done = must([*command, CSRC / "cuda" / f"{kernel}.cu", "-o", unfinished])
        result.with_suffix(".txt").write_text(done.stderr)
        unfinished.rename(result)
    return result


def prepare(cache: Path) -> dict[tuple[str, str], Path]:
    """Every kernel for every architecture."""
    need("nvcc")
    wanted = [(kernel, arch) for arch in ARCHS for kernel in KERNELS if kernel != "devices" or arch == LINKED]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(wanted, pool.map(lambda what: compile_one(cache, *what), wanted), strict=True))


@pytest.fixture(scope="module")
def compiled(artefacts: Path) -> dict[tuple[str, str], Path]:
    return prepare(artefacts)


def test_no_spills(compiled):
    """Every shape of every dtype; the accumulators of a block of eight warps may take all registers there are."""
    seen = []
    for path in compiled.values():
        for usage in usages(path.with_suffix(".txt").read_text()):
            seen.append((usage.kernel, usage.dtype, usage.arch))
            assert usage.spills == 0, usage
    for arch in ARCHS:
        for dtype in DTYPES:
            assert seen.count(("fused_loss", dtype, arch)) == SHAPES[dtype]
            assert seen.count(("finish", dtype, arch)) == 4


# What a kernel is made of: matrices loaded as such, copies that nobody waits for, and products on the tensor cores.
INSTRUCTIONS = {
    "bfloat16": ("LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS", "HMMA.16816.F32.BF16", "MUFU.EX2", "MUFU.RCP"),
    "float16": ("LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS", "HMMA.16816.F32", "MUFU.EX2", "MUFU.RCP"),
    "tf32": ("LDSM.16.M88.4", "LDGSTS", "HMMA.1688.F32.TF32", "MUFU.EX2", "MUFU.RCP"),
}


@pytest.mark.parametrize("arch", ARCHS)
def test_instructions(compiled, arch):
    cuobjdump = _disassembler()
    sass = must([cuobjdump, "-sass", compiled["fused_loss", arch]]).stdout
    per_kernel = re.split(r"Function : ", sass)[1:]
    assert len(per_kernel) == sum(SHAPES.values())
    for body in per_kernel:
        name = body.split(maxsplit=1)[0]
        missing = [op for op in INSTRUCTIONS[dtype_of(name)] if op not in body]
        assert not missing, (name, missing)
        assert "LDL" not in body and "STL" not in body, name  # nothing in local memory


def _disassembler() -> str:
    """cuobjdump from the toolkit, or the one that triton brings."""
    import shutil

    found = shutil.which("cuobjdump")
    if found is None:
        triton = pytest.importorskip("triton")
        brought = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        found = str(brought) if brought.exists() else None
    if found is None:
        pytest.skip("cuobjdump is not installed")
    return found


# --- the extension ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def extension(compiled, artefacts: Path) -> Path:
    """``_cuda`` linked as setup.py links it: the objects, the bindings, the static runtime."""
    told = run([need("nvcc"), "--dryrun", "-c", "x.cu"]).stderr
    toolkit = Path(re.search(r"^#\$ TOP=(.*)$", told, re.MULTILINE)[1]).resolve()
    runtime = next(toolkit.glob("**/libcudart_static.a"), None)
    if runtime is None:
        pytest.skip("the static CUDA runtime is not installed")
    module = compiled["fused_loss", LINKED].parent / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not module.exists():
        objects = [*(compiled[kernel, LINKED] for kernel in KERNELS), bindings(artefacts)]
        libraries = [f"-L{runtime.parent}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        must([need("g++"), "-shared", *objects, *libraries, "-o", module])
    return module


def test_extension_needs_no_driver_to_import(extension):
    code = "import sys, _cuda; print(_cuda.TILE, 'torch' in sys.modules)"
    done = must([sys.executable, "-c", code], cwd=extension.parent)
    assert done.stdout.split() == ["32", "False"]
    assert "torch" not in must(["ldd", extension]).stdout


def test_launch_without_a_driver_says_so(extension):
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this machine has a CUDA driver")
    except OSError:
        pass
    # In a process of its own: this one may hold the host's build of the same module.
    done = must([sys.executable, "-c", WITHOUT_DRIVER], cwd=extension.parent)
    count, devices, launch, blocks, dtype = done.stdout.splitlines()
    assert count == "0"
    assert "no CUDA driver" in devices
    assert launch.startswith("CudaError RuntimeError ") and "no CUDA driver" in launch
    assert blocks.startswith("CudaError")
    assert dtype.startswith("ValueError") and "dtype must be" in dtype


WITHOUT_DRIVER = """
import _cuda

def told(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, type(error).__base__.__name__, error)

print(_cuda.device_count())
print(_cuda.devices())
numbers = dict.fromkeys(_cuda.FLASH_FIELDS, 0) | dict(batch=1, labels=1, slack=1, block_labels=32, blocks=1, dense_type="")
loss = tuple(dict.fromkeys(_cuda.LOSS_FIELDS, 0).values())
told(lambda: _cuda.fused_loss(0, 0, _cuda.Flash("bfloat16", loss, tuple(numbers.values()))))
told(lambda: _cuda.processors(0))
told(lambda: _cuda.sizes_of_block("float8", 1, 1, 0))
"""
