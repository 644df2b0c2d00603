"""Builds the compiled core, ``sigkernels._C``, from ``csrc`` with pybind11 and no torch header."""

import glob
import os

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

# A source file named *_<isa>.cpp is compiled for that instruction set; the code picks one at run time.
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
}


class BuildExt(build_ext):
    def build_extension(self, ext):
        compile_one = self.compiler._compile

        def compile_for_isa(obj, src, suffix, cc_args, extra, pp_opts):
            isa = os.path.splitext(os.path.basename(src))[0].rpartition("_")[2]
            compile_one(obj, src, suffix, cc_args, extra + ISA_FLAGS.get(isa, []), pp_opts)

        self.compiler._compile = compile_for_isa
        super().build_extension(ext)


sources = sorted(glob.glob("csrc/*.cpp") + glob.glob("csrc/cpu/*.cpp"))
setup(
    ext_modules=[
        Pybind11Extension(
            "sigkernels._C",
            sources,
            include_dirs=["csrc"],
            cxx_std=17,
            extra_compile_args=["-O3", "-fopenmp", "-g0"],
            extra_link_args=["-fopenmp"],
        )
    ]
    if sources
    else [],
    cmdclass={"build_ext": BuildExt},
)
