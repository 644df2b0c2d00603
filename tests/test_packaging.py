"""What is in the sdist and the wheel, and what a build does without a compiler or a toolkit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("pybind11", reason="building needs pybind11")
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")

SOURCE_PARTS = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md")
SOURCE_PARTS += ("CONTRIBUTING.md", "Makefile", "constraints.txt", "csrc", "sigkernels", "tests", "bench")
SOURCE_PARTS += ("examples", "docs", ".ci")
FOLDERS = ("csrc/", "sigkernels/", "tests/", "bench/", "examples/", "docs/")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the source tree without anything built: builds leave files beside the sources."""
    copy = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("*.so", "__pycache__", "out", "*.egg-info")
    for part in SOURCE_PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=skip)
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, copy / part)
    return copy


def run_setup(source: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    names = ("SIGKERNELS_", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    command = [sys.executable, "setup.py", *args]
    return subprocess.run(command, cwd=source, env=clean | env, capture_output=True, text=True, timeout=300)


def test_sdist_carries_everything(source, tmp_path):
    done = run_setup(source, "-q", "sdist", "--dist-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("the list of files to compare with comes from git")
    expected = {n for n in tracked.stdout.splitlines() if n.startswith(FOLDERS)}
    expected |= {"LICENSE", "README.md", "setup.py", "pyproject.toml", "constraints.txt", "Makefile"}
    assert expected <= names, sorted(expected - names)
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_wheel_carries_types_and_data(source, tmp_path):
    done = run_setup(source, "-q", "bdist_wheel", "--dist-dir", str(tmp_path), SIGKERNELS_NO_EXT="1")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sigkernels/py.typed" in names
    assert "sigkernels/datasets/debian_deps.npz" in names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "sigkernels").rglob("*.py")}
    assert modules <= set(names), sorted(modules - set(names))
    assert not [name for name in names if name.startswith(("tests/", "bench/", "csrc/"))]


@pytest.mark.skipif(not list((ROOT / "csrc").glob("*.cpp")), reason="no compiled core in this tree")
@pytest.mark.parametrize("required", [False, True])
def test_a_build_without_a_compiler(source, tmp_path, required):
    done = run_setup(
        source,
        *("build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")),
        CC="no-such-compiler",
        CXX="no-such-compiler",
        SIGKERNELS_CUDA="0",
        **({"SIGKERNELS_REQUIRE_EXT": "1"} if required else {}),
    )
    assert (done.returncode != 0) == required, done.stdout + done.stderr
    assert "no-such-compiler" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_wheel_has_no_openmp_runtime_of_its_own():
    """torch's is loaded first; a bundled copy would be a second thread pool."""
    shown = subprocess.run(["make", "--dry-run", "wheel"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    (repair,) = [line for line in shown.stdout.splitlines() if "auditwheel repair" in line]
    assert "--exclude libgomp.so.1" in repair
    assert "auditwheel repair --exclude libgomp.so.1" in (ROOT / "pyproject.toml").read_text()  # cibuildwheel's


def test_cuda_asked_for_but_no_nvcc(source, tmp_path):
    done = run_setup(source, "--version", SIGKERNELS_CUDA="1", CUDA_HOME=str(tmp_path))
    assert done.returncode != 0
    assert "there is no nvcc" in done.stderr and "CUDA_HOME" in done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.skipif(not list((ROOT / "csrc").glob("cuda/*.cu")), reason="no CUDA kernels in this tree")
def test_cuda_arch_that_cannot_be_read(source):
    done = run_setup(source, "--version", SIGKERNELS_CUDA="1", TORCH_CUDA_ARCH_LIST="8.0;hopper")
    assert done.returncode != 0
    assert "TORCH_CUDA_ARCH_LIST" in done.stderr and "'hopper'" in done.stderr


def test_no_torch_in_the_build_requirements_and_none_in_the_core():
    build_system = (ROOT / "pyproject.toml").read_text().partition("[project]")[0]
    requires = [line for line in build_system.splitlines() if line.startswith("requires")]
    assert requires and "torch" not in requires[0]
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h", ".hpp", ".cu", ".cuh")]
    including = [
        path for path in sources if "#include <torch" in path.read_text() or "#include <ATen" in path.read_text()
    ]
    assert not including
