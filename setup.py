"""Builds the compiled core from ``csrc`` with pybind11 and no torch header.

``sigkernels._C``     the CPU kernels: ``csrc/*.cpp`` and ``csrc/cpu/*.cpp``
``sigkernels._cuda``  the CUDA kernels: ``csrc/cuda/*.cu`` and ``csrc/cuda/*.cpp``, only where nvcc is

Environment:
    SIGKERNELS_REQUIRE_EXT=1  a build that fails is an error; without it the package installs as pure Python
    SIGKERNELS_NO_EXT=1       build nothing
    SIGKERNELS_CUDA=1 / 0     build the CUDA kernels, or do not; unset: where a toolkit and a driver both are
    CUDA_HOME                 the toolkit; without it nvcc is looked up on PATH
    TORCH_CUDA_ARCH_LIST      e.g. "8.0;9.0+PTX"; default 8.0;9.0;10.0;12.0+PTX
    SIGKERNELS_TEST_ISA=1     add the instruction sets that only tests use (csrc/cpu/testing)
    SIGKERNELS_BUILD_JOBS     compiler processes at a time; default: one per core
"""

import ctypes
import glob
import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, has_flag
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError
from setuptools.modified import newer_group

# A source file named *_<isa>.cpp is compiled for that instruction set, and left out on other processors; the code
# picks one at run time.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
}
X86 = platform.machine().lower() in ("x86_64", "amd64")
# Contraction is what makes a multiply-add one instruction. No -ffast-math: NaN and infinity mean something here.
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
DEFAULT_CUDA_ARCHS = "8.0;9.0;10.0;12.0+PTX"
JOBS = int(os.environ.get("SIGKERNELS_BUILD_JOBS") or os.cpu_count() or 1)


def asked(name):
    """An on/off environment variable: True, False, or None when it is not set."""
    value = os.environ.get(name, "").lower()
    return None if not value else value not in ("0", "off", "false", "no")


# --- the CPU kernels ---------------------------------------------------------------------------------


def isa_of(source):
    """The instruction set that a source file is named after, or None."""
    isa = Path(source).stem.rpartition("_")[2]
    return isa if isa in ISA_FLAGS else None


def cpu_extension(optional):
    sources = sorted(glob.glob("csrc/*.cpp") + glob.glob("csrc/cpu/*.cpp"))
    # Micro-kernels of other machines on the instructions of this one, for the tests.
    testing = asked("SIGKERNELS_TEST_ISA")
    if testing:
        sources += sorted(glob.glob("csrc/cpu/testing/*.cpp"))
    if not X86:
        sources = [source for source in sources if isa_of(source) is None]
    if not sources:
        return []
    headers = glob.glob("csrc/*.h*") + glob.glob("csrc/core/*.h*") + glob.glob("csrc/cpu/*.h*")
    return [
        Pybind11Extension(
            "sigkernels._C",
            sources,
            depends=["setup.py", *sorted(headers)],
            include_dirs=["csrc"],
            cxx_std=17,
            define_macros=[("SK_TEST_ISA", "1")] if testing else [],
            extra_compile_args=list(FLAGS),
            optional=optional,
        )
    ]


# --- the CUDA kernels --------------------------------------------------------------------------------


def find_nvcc():
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=os.path.join(home, "bin")) if home else shutil.which("nvcc")


def has_driver():
    """A loadable libcuda: a toolkit alone is no reason to spend minutes on kernels that cannot run."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return shutil.which("nvidia-smi") is not None
    return True


def toolkit_of(nvcc):
    """The root of nvcc's toolkit, from nvcc itself: the nvcc on PATH may be a link or a wrapper."""
    output = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", output, re.MULTILINE)
    return Path(top.group(1)).resolve() if top else Path(nvcc).resolve().parent.parent


def arch_flags(archs):
    """TORCH_CUDA_ARCH_LIST → nvcc's -gencode flags: "9.0" and "90" are sm_90; "+PTX" adds compute_90."""
    flags = []
    for arch in re.split(r"[;,\s]+", archs.strip(" ;,")):
        found = re.fullmatch(r"(\d+)\.?(\d)([af]?)(\+PTX)?", arch)
        if not found:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: cannot read {arch!r}; give for example '8.0;9.0+PTX'")
        sm = found[1] + found[2] + found[3]
        flags.append(f"-gencode=arch=compute_{sm},code=sm_{sm}")
        if found[4]:
            flags.append(f"-gencode=arch=compute_{sm},code=compute_{sm}")
    return flags


def cuda_extension(optional):
    """``sigkernels._cuda`` when it is asked for, or when a toolkit and a driver are both there."""
    wanted = asked("SIGKERNELS_CUDA")
    kernels = sorted(glob.glob("csrc/cuda/*.cu"))
    nvcc = find_nvcc()
    if wanted is False or (wanted is None and not (nvcc and kernels and has_driver())):
        return []
    if not nvcc:
        raise SystemExit(
            "SIGKERNELS_CUDA=1 but there is no nvcc: install the CUDA toolkit and set CUDA_HOME to it or put "
            "nvcc on PATH, or unset SIGKERNELS_CUDA to build without the CUDA kernels"
        )
    if not kernels:
        raise SystemExit("SIGKERNELS_CUDA=1 but csrc/cuda has no .cu file: the source tree is incomplete")
    toolkit = toolkit_of(nvcc)
    # The static runtime lies in lib, lib64 or targets/<arch>/lib, depending on who packed the toolkit.
    runtime = [p.parent for p in toolkit.glob("**/libcudart_static.a")]
    if not runtime:
        raise SystemExit(f"no libcudart_static.a under {toolkit}: install the CUDA runtime development files")
    ext = Pybind11Extension(
        "sigkernels._cuda",
        sorted(glob.glob("csrc/cuda/*.cpp")),
        depends=["setup.py", *kernels, *glob.glob("csrc/cuda/*.*h"), *glob.glob("csrc/core/*.h*")],
        include_dirs=["csrc", str(toolkit / "include")],
        library_dirs=[str(runtime[0])],
        libraries=["cudart_static", "dl", "rt", "pthread"],
        cxx_std=17,
        extra_compile_args=["-O3"],
        optional=optional and not wanted,
    )
    ext.nvcc, ext.kernels = nvcc, kernels
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_CUDA_ARCHS
    ext.nvcc_flags = arch_flags(archs)
    ext.define_macros += [("SK_CUDA_ARCHS", f'"{archs}"')]
    return [ext]


def compile_kernels(ext, build_temp):
    """Every ``.cu`` of ``ext`` with nvcc, in parallel. Returns the object files."""
    out = Path(build_temp, "cuda")
    out.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", *ext.nvcc_flags]
    flags += [f"-I{path}" for path in ext.include_dirs]

    def compile_one(kernel):
        obj = out / (Path(kernel).stem + ".o")
        command = [ext.nvcc, "-c", kernel, "-o", str(obj), *flags]
        print(" ".join(command), flush=True)
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"nvcc failed on {kernel}: {error}") from error
        return str(obj)

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(compile_one, ext.kernels))


# --- the build ---------------------------------------------------------------------------------------


class BuildExt(build_ext):
    def build_extensions(self):
        if self.compiler.compiler_type == "msvc":
            self._leave_out_kernels()
        openmp = ["-fopenmp"] if has_flag(self.compiler, "-fopenmp") else []
        for ext in self.extensions:
            ext.extra_compile_args += openmp
            ext.extra_link_args += openmp
            newest = [source for source in ext.sources if isa_of(source) == "avx512bf16"]
            if newest and has_flag(self.compiler, "-mavx512bf16"):
                ext.define_macros += [("SK_AVX512BF16", "1")]
            else:  # an older compiler: bfloat16 is widened
                ext.sources = [source for source in ext.sources if source not in newest]
            # What the extension says of itself in `sigkernels env`.
            ext.define_macros += [("SK_COMPILE_FLAGS", f'"{" ".join(ext.extra_compile_args)}"')]
        compile_one = self.compiler._compile

        def compile_for_isa(obj, src, suffix, cc_args, extra, pp_opts):
            compile_one(obj, src, suffix, cc_args, [*extra, *ISA_FLAGS.get(isa_of(src), [])], pp_opts)

        self.compiler._compile = compile_for_isa
        super().build_extensions()

    def _leave_out_kernels(self):
        """The kernels are written with the vector extensions of GCC and Clang."""
        reason = "MSVC cannot compile the CPU kernels; everything runs on plain torch"
        if not all(ext.optional for ext in self.extensions):
            raise CompileError(f"{reason}, or leave SIGKERNELS_REQUIRE_EXT unset")
        self.warn(reason)
        self.extensions = []

    def build_extension(self, ext):
        stale = self.force or newer_group([*ext.sources, *ext.depends], self.get_ext_fullpath(ext.name))
        if stale and hasattr(ext, "kernels"):
            ext.extra_objects = compile_kernels(ext, self.build_temp)
        super().build_extension(ext)


if __name__ == "__main__":
    optional = not asked("SIGKERNELS_REQUIRE_EXT")
    ParallelCompile("SIGKERNELS_BUILD_JOBS", default=JOBS).install()
    setup(
        ext_modules=[] if asked("SIGKERNELS_NO_EXT") else cpu_extension(optional) + cuda_extension(optional),
        cmdclass={"build_ext": BuildExt},
    )
