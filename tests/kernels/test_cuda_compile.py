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
import torch

from sigkernels.backends.gpu_tiles import tile_factors
from sigkernels.layer import Layer, LayerMeta

from .ptxas import usages
from .toolchain import CSRC, KERNELS, bindings, fingerprint, host_module, must, need, run

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
LINKED = "sm_80"  # the architecture of the extension that is linked below
LOSSES = ("fused_loss", "confusion_loss", "add_slabs")
REGISTERS = 128  # two blocks of 256 threads on a multiprocessor of 65536
# Bytes of shared memory that a block may have; a multiprocessor has 1 KB more, and each block costs 1 KB beside.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}


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
    """Every kernel for every architecture; the host's build too, which some of the tests ask for its sizes."""
    host_module(cache)
    need("nvcc")
    wanted = [(kernel, arch) for kernel in KERNELS for arch in ARCHS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(wanted, pool.map(lambda what: compile_one(cache, *what), wanted), strict=True))


@pytest.fixture(scope="module")
def compiled(artefacts: Path) -> dict[tuple[str, str], Path]:
    return prepare(artefacts)


def test_no_spills_and_registers_below_the_ceiling(compiled):
    seen = set()
    for path in compiled.values():
        for usage in usages(path.with_suffix(".txt").read_text()):
            seen.add((usage.kernel, usage.dtype, usage.arch))
            assert usage.spills == 0, usage
            assert usage.kernel not in LOSSES or usage.registers <= REGISTERS, usage
    # Five dtypes, of which add_slabs has two; both passes of predict count as one.
    assert len(seen) == (5 * (len(KERNELS) - 1) + 2) * len(ARCHS)


def test_shared_memory_fits_every_architecture(host_kernels):
    """A block fits everywhere; two of a loss, U and V included, fit on sm_80, sm_90 and sm_100 except in float64."""
    for dtype in ("float32", "tf32", "bfloat16", "float16", "float64"):
        most = host_kernels.block_shared_memory(dtype)
        assert most <= min(SHARED.values())
        assert dtype == "float64" or 2 * (most + 1024) <= SHARED["sm_80"] + 1024
        for kernel, needed in host_kernels.shared_memory(dtype).items():
            assert needed <= (most if kernel.endswith("loss") else min(SHARED.values())), (dtype, kernel, needed)


def test_usual_factors_stay_in_shared_memory(host_kernels):
    """U and V of n = 8921, k = 80 and of n = 20 000, k = 50 fit beside the fused pass in every dtype."""
    for num_labels, k in ((8921, 80), (20_000, 50)):
        for dtype in ("float32", "tf32", "bfloat16", "float16", "float64"):
            kind = torch.float64 if dtype == "float64" else torch.float32
            factors = tile_factors(
                Layer(torch.empty(1, 0, dtype=kind), None, LayerMeta(num_labels, k)), host_kernels.TILE
            )
            free = host_kernels.block_shared_memory(dtype) - host_kernels.shared_memory(dtype)["fused_loss"]
            assert factors.u.nbytes + factors.v.nbytes <= free, (num_labels, k, dtype)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", ["fused_loss", "confusion_loss"])
def test_tensor_cores_are_used(compiled, kernel, arch):
    """The 16-bit and tf32 kernels multiply on the tensor cores, float32 and float64 do not."""
    cuobjdump = _disassembler()
    sass = must([cuobjdump, "-sass", compiled[kernel, arch]]).stdout
    per_kernel = re.split(r"Function : ", sass)[1:]
    assert len(per_kernel) == 5
    for body in per_kernel:
        name = body.split(maxsplit=1)[0]
        found = set(re.findall(r"HMMA\.\S+", body))
        if "EngineE1" not in name:
            assert not found, name
        elif "__nv_bfloat16" in name:
            assert any("F32.BF16" in op for op in found), found
        elif "__half" in name:
            assert any(op.startswith("HMMA.16816.F32") for op in found), found
        else:
            assert any("TF32" in op for op in found), found


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
    assert done.stdout.split() == ["64", "False"]
    assert "torch" not in must(["ldd", extension]).stdout


def test_launch_without_a_driver_says_so(extension):
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this machine has a CUDA driver")
    except OSError:
        pass
    # In a process of its own: this one may hold the host's build of the same module.
    done = must([sys.executable, "-c", WITHOUT_DRIVER], cwd=extension.parent)
    count, devices, launch, slabs, blocks, dtype = done.stdout.splitlines()
    assert count == "0"
    assert "no CUDA driver" in devices
    assert launch.startswith("CudaError RuntimeError logits: ") and "no CUDA driver" in launch
    assert slabs.startswith("CudaError RuntimeError add_slabs: ") and "no CUDA driver" in slabs
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
sizes = dict(batch=1, labels=1, slack=1, rank=0, even=0, columns=0, dft_stride=0)
launch = _cuda.Launch(device=0, stream=0, dtype="float32", x=0, dft=0, weight=0, bias=0, u=0, v=0, turn=0, **sizes)
told(lambda: _cuda.logits(launch, out=0, out_stride=1))
told(lambda: _cuda.add_slabs(device=0, stream=0, slabs=0, out=0, scale=0, count=1, size=1, wide=False, accumulate=False))
told(lambda: _cuda.resident_blocks("float32", 0))
told(lambda: _cuda.rows_per_group("float8"))
"""
