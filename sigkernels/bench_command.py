"""``sigkernels bench``: runs the suites of ``bench/`` and writes one report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import machine_load
from .cli import add_command

STDERR = 2
BAD_EXPRESSION, NOTHING_SELECTED = 4, 5  # pytest's exit codes
REGRESSION = 1
SUITES_FAILED = 3


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = add_command(
        subparsers,
        "bench",
        help="every benchmark against its peers, as one report",
        description="Runs the benchmark suites of the source tree and reports each case beside what people would use "
        "instead. Exit code 1 when --compare finds something slower, 3 when a suite failed.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: a minute or two")
    parser.add_argument("--only", metavar="NAME", help="suites and cases whose name contains NAME (pytest -k)")
    parser.add_argument("--suites", type=Path, help="the bench directory (default: that of the source tree)")
    parser.add_argument("--output", type=Path, default=Path("bench/out"), help="default: %(default)s")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an earlier report.json or pytest-benchmark file")
    parser.add_argument("--tolerance", type=float, default=0.25, help="slowdown that counts (default %(default)s)")
    parser.add_argument("--brief", action="store_true", help="with --compare: print what changed, as a Markdown table")
    parser.add_argument("--html", action="store_true", help="write report.html too")
    parser.add_argument("--require-idle", action="store_true", help="refuse to measure while other work is running")


def run(args: argparse.Namespace) -> int:
    suites = find_suites(args.suites)
    report = load_report(suites)
    check_arguments(args)
    before = report.read(args.compare)[0] if args.compare else []
    names, cases = choose(suites, args.only)
    make_folder(args.output)
    load = machine_load.at_start()
    if args.require_idle and load.warnings:
        raise ValueError(f"the machine is busy (--require-idle): {'. '.join(load.warnings)}")
    for warning in load.warnings:
        print(f"sigkernels bench: warning: {warning}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        files, failed = run_suites(suites, names, cases, Path(folder), args.quick)
        records = [record for file in files for record in report.read(file)[0]]
    if not records:
        raise ValueError(f"no benchmark ran: none of {', '.join(names)} can run here; the reasons are above")

    from . import env

    changes = report.compare(records, before, args.tolerance)
    command = " ".join(["sigkernels", *sys.argv[1:]])
    observed = load.as_dict() | {"warnings": load.warnings}
    measured = report.Run(records, changes, env.collect(), command, observed)
    result = report.as_json(measured)
    (args.output / "report.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    if args.html:
        (args.output / "report.html").write_text(report.page(measured), encoding="utf-8")
    shown = report.brief if args.brief else report.text
    print(json.dumps(result, indent=1) if args.json else shown(measured))
    written = ["report.json", *(["report.html"] if args.html else []), *write_gpu_paths(suites, records, args.output)]
    print(f"\nWrote {', '.join(written)} to {args.output}", file=sys.stderr)
    if failed:
        print(f"sigkernels bench: failed: {', '.join(failed)}; the report holds the others", file=sys.stderr)
        return SUITES_FAILED
    return REGRESSION if any(change.verdict == "slower" for change in changes) else 0


def write_gpu_paths(suites: Path, records: list[Any], folder: Path) -> list[str]:
    """The table of GPU paths and its differences from the model's, where they were timed; the names of the files."""
    if not any(record.suite == "gpu_paths" for record in records):
        return []
    import torch

    from .backends import gpu_paths

    device = torch.device("cuda", torch.cuda.current_device())
    name, kind = torch.cuda.get_device_name(device), gpu_paths.architecture(device)
    files: list[str] = load_module(suites / "gpu_paths.py").write(records, folder, kind, name)
    print(
        f"\nWhere the model of '{kind}' devices was wrong about this one: {folder / 'gpu_paths.md'}\n"
        f"To go by these times: {gpu_paths.VARIABLE}={folder.resolve() / 'gpu_paths.json'}",
        file=sys.stderr,
    )
    return files


def check_arguments(args: argparse.Namespace) -> None:
    """Refuses what cannot work before the long work begins."""
    if not (args.tolerance > 0 and math.isfinite(args.tolerance)):
        raise ValueError(f"--tolerance must be a positive number, got {args.tolerance}")
    if args.only is not None and not args.only.strip():
        raise ValueError("--only must name a suite or a case, got nothing")
    if args.compare is not None and not args.compare.is_file():
        raise ValueError(f"--compare must be a file of an earlier run, but {args.compare} is none")
    if args.brief and args.compare is None:
        raise ValueError("--brief prints a comparison: give an earlier run with --compare FILE")
    for package in ("pytest", "pytest_benchmark"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"the benchmarks need {package}: pip install pytest pytest-benchmark matplotlib")


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be written to, got {path} ({error.strerror})") from error


def find_suites(given: Path | None) -> Path:
    """The directory with ``bench_*.py`` and ``report.py``: the suites are part of the source tree, not of the wheel."""
    places = [given] if given else [Path("bench"), Path(__file__).resolve().parent.parent / "bench"]
    for place in places:
        if (place / "report.py").exists():
            return place
    looked = " or ".join(map(str, places))
    raise ValueError(f"no benchmark suites in {looked}: run this in a clone of the source tree, or give --suites")


def load_report(suites: Path) -> Any:
    return load_module(suites / "report.py")


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"sigkernels_bench_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def choose(suites: Path, only: str | None) -> tuple[list[str], list[str]]:
    """The suites that ``only`` chooses by name or, where no suite has that name, those with cases that have it.

    Also returns what tells pytest to run these cases alone.
    """
    names = [path.stem.removeprefix("bench_") for path in sorted(suites.glob("bench_*.py"))]
    if not names:
        raise ValueError(f"there is no bench_*.py in {suites}")
    chosen = [name for name in names if only and only in name]
    if only is None or chosen:
        return chosen or names, []
    cases = ["-k", only]
    files = [suites / f"bench_{name}.py" for name in names]
    found = subprocess.run(_pytest(suites, files, "--collect-only", *cases), stdout=subprocess.PIPE, text=True)
    if found.returncode == BAD_EXPRESSION:
        raise ValueError(f"--only {only!r} is no expression that pytest -k takes; its message is above")
    if found.returncode == NOTHING_SELECTED:
        raise ValueError(f"no suite and no case has {only!r} in its name; the suites are {', '.join(names)}")
    # A suite that cannot be read has no cases; it is to fail in a run of its own.
    return [name for name in names if f"bench_{name}.py" in found.stdout], cases


def run_suites(
    suites: Path, names: list[str], cases: list[str], out: Path, quick: bool
) -> tuple[list[Path], list[str]]:
    """Runs every suite in a process of its own, so that none inherits another's memory or thread settings.

    Returns the files that pytest-benchmark wrote to ``out`` and the names of the suites that failed. The progress goes
    to stderr.
    """
    environment = os.environ | ({"SIGKERNELS_BENCH_QUICK": "1"} if quick else {})
    options = [*cases, "--benchmark-only", "--benchmark-quiet", "--benchmark-columns=median"]
    options += ["--benchmark-max-time=0.3", "--benchmark-min-rounds=3"] if quick else []
    files, failed = [], []
    for name in tqdm(names, unit="suite", disable=None):
        file = out / f"{name}.json"
        command = _pytest(suites, [suites / f"bench_{name}.py"], *options, "--benchmark-json", str(file))
        done = subprocess.run(command, env=environment, stdout=STDERR, check=False)
        if done.returncode not in (0, NOTHING_SELECTED):
            failed.append(name)
        if file.exists() and file.stat().st_size:
            files.append(file)
    if failed and not files:
        raise ValueError(f"every suite failed ({', '.join(failed)}); the reasons are above")
    return files, failed


def _pytest(suites: Path, files: list[Path], *options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", *map(str, files), "--rootdir", str(suites), "-q", *options]
    return [*command, "-p", "no:cacheprovider", "-o", "python_files=bench_*.py"]
