"""Predicts the time of a training step on GPUs by every path, beside models of eager torch, torch.compile and chunked cuBLAS.

    PYTHONPATH=… python bench/predict_gpu.py               # docs/results/gpu_model.json, and the table of docs/gpu.md
    PYTHONPATH=… python bench/predict_gpu.py --table       # sigkernels/backends/gpu_paths.json, by which `auto` chooses

It needs the package gpumodel on PYTHONPATH, which is not part of this project, Triton and nvcc. Every launch and product is
counted on the real host code (``gpu_launches.py``), kernels are simulated from their machine code (``gpu_model.py``), and
each launch counts 2 µs, as in the models of the others. Predictions, never measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sigkernels.backends import flash_pass, gpu_paths
from sigkernels.backends.gpu_paths import GPUPath, Times
from sigkernels.layer import LayerMeta

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "docs" / "results" / "gpu_model.json"
PAGE = ROOT / "docs" / "gpu.md"
COMMAND = "python bench/predict_gpu.py"


class Bar(NamedTuple):
    """A case, and what its time over torch.compile's should be at the most."""

    n: int
    k: int
    s: int
    rows: int
    most: float
    launches: int | None = None  # at the most

    def __str__(self) -> str:
        dft = f"k={self.k}" if self.k >= 0 else "no DFT"
        return f"n={self.n:,} {dft} s={self.s} B={self.rows}"


BARS = [
    Bar(8_921, 80, 50, 64, 1.0, 8),
    Bar(8_921, 80, 50, 256, 1.0, 8),
    Bar(20_000, 50, 100, 64, 1.0, 8),
    Bar(20_000, 50, 100, 256, 1.0, 8),
    Bar(100_000, 50, 64, 256, 0.7),
    Bar(1_000_000, 50, 64, 256, 0.7),
    Bar(8_921, 80, 500, 1024, 1.0),
    Bar(131_072, -1, 768, 1024, 1.0),
]
DTYPES = ("bf16", "tf32")
MOST_OF_DFT = 1.25  # time with a DFT part over that without


def steps(machine: str, dtype: str, n: int, k: int, s: int, rows: int) -> dict[GPUPath, tuple[float, int]]:
    """Seconds and launches by every path that does the case."""
    import gpu_model
    import gpu_model_cuda
    import gpu_model_flash

    case = (machine, dtype, n, k, s, rows)
    found: dict[GPUPath, tuple[float, int]] = {}
    if s <= gpu_model_cuda.WIDEST:
        found["cuda"] = gpu_model_cuda.cuda_flash(*case)
    if s <= flash_pass.WIDEST:
        found["flash"] = gpu_model_flash.triton_flash(*case)
    found["library"] = gpu_model.library(*case)
    return {path: step for path, step in found.items() if step[0] < math.inf}


def chosen(machine: str, dtype: str, s: int, rows: int, n: int, among: Iterable[GPUPath]) -> GPUPath:
    """What ``auto`` takes of these paths: it goes by the table, which has classes of cases."""
    device = next(name for name, device in gpu_paths.ARCHITECTURES.items() if device.endswith(machine))
    product: gpu_paths.Product = "tf32" if dtype == "tf32" else "16-bit"
    shape = gpu_paths.LossShape(torch.device("cuda"), torch.float32, product, rows, s, n, LayerMeta(n, -1))
    return gpu_paths.choose_for_class(device, shape.shape_class(), tuple(among)).path


def predict(bar: Bar, dtype: str, machine: str) -> dict[str, Any]:
    """One entry of the result."""
    import gpu_model

    case = bar[:4]
    found = steps(machine, dtype, *case)
    path = chosen(machine, dtype, bar.s, bar.rows, bar.n, found)
    seconds, launches = found[path]
    others = gpu_model.baselines.baselines(gpu_model.MACHINES[machine], dtype, *case)
    entry = dict(
        n=bar.n, k=bar.k, s=bar.s, B=bar.rows, dtype=dtype, machine=machine, path=path, launches=launches,
        microseconds={name: round(step * 1e6, 1) for name, (step, _) in found.items()},
        eager=round(others.eager * 1e6, 1), compiled=round(others.compiled * 1e6, 1), chunked=round(others.chunked * 1e6, 1),
        ratio=round(seconds / others.compiled, 3), bar=bar.most,
    )  # fmt: skip
    entry["met"] = entry["ratio"] <= bar.most and launches <= (bar.launches or launches)
    if bar.k >= 0:
        without = steps(machine, dtype, bar.n, -1, bar.s, bar.rows)
        entry["dft"] = round(seconds / without[chosen(machine, dtype, bar.s, bar.rows, bar.n, without)][0], 3)
    return entry


def predict_steps(machines: list[str]) -> list[dict[str, Any]]:
    """Every bar."""
    found = []
    for bar in BARS:
        for dtype in DTYPES:
            for machine in machines:
                found.append(predict(bar, dtype, machine))
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def predict_others(machines: list[str]) -> list[dict[str, Any]]:
    """What is not an elementwise loss, in bfloat16."""
    import gpu_model_others

    found = []
    for name, operation in gpu_model_others.OPERATIONS.items():
        for n, k, s, rows in gpu_model_others.CASES:
            for machine in machines:
                times = operation(machine, "bf16", n, k, s, rows)
                microseconds = {
                    who: None if step is None else round(step * 1e6, 1)
                    for who, step in times._asdict().items()
                    if who != "launches"
                }
                found.append(
                    dict(operation=name, n=n, k=k, s=s, B=rows, machine=machine, launches=times.launches) | microseconds
                )
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def page_of_others(entries: list[dict[str, Any]]) -> str:
    """Their table."""
    machines = list(dict.fromkeys(entry["machine"] for entry in entries))
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        times = [entry["ours"], entry["eager"], *([entry["compiled"]] if entry["compiled"] else [])]
        case = str(Bar(entry["n"], entry["k"], entry["s"], entry["B"], 0))
        cell = " / ".join(map(_short, times)) + f" ({entry['launches']})"
        rows.setdefault((entry["operation"], case), []).append(cell)
    lines = [f"| operation | case | {' | '.join(machines)} |", f"|---|---|{'---|' * len(machines)}"]
    return "\n".join(lines + [f"| {name} | {case} | {' | '.join(cells)} |" for (name, case), cells in rows.items()])


def page(entries: list[dict[str, Any]]) -> str:
    """The table of docs/gpu.md."""
    machines = list(dict.fromkeys(entry["machine"] for entry in entries))
    lines = [
        "**A model's predictions, never measured** (its own error: 15 to 30 %, of a ratio 10 to 15 %). A step, forward and "
        "backward of BCE with 15 active labels a row: the path that `auto` takes, µs ours / eager / `torch.compile` / cuBLAS "
        "in chunks; in brackets ours over `torch.compile`'s. The others hold the DFT as a matrix and get dense targets.\n",
        f"| case | dtype | bar | {' | '.join(machines)} |",
        f"|---|---|---:|{'---|' * len(machines)}",
    ]
    rows: dict[tuple[Any, ...], list[str]] = {}
    for entry in entries:
        bar = _bar(entry)
        ours = entry["microseconds"][entry["path"]]
        times = " / ".join(_short(t) for t in (ours, entry["eager"], entry["compiled"], entry["chunked"]))
        ratio = f"{entry['ratio']:.2f}" if entry["met"] else f"**{entry['ratio']:.2f}**"
        rows.setdefault((str(bar), entry["dtype"], bar.most), []).append(f"{entry['path']} {times} ({ratio})")
    lines += [f"| {case} | {dtype} | {bar} | {' | '.join(cells)} |" for (case, dtype, bar), cells in rows.items()]
    lines.append("\n" + _missed(entries))
    lines.append(_without_cuda(entries))
    lines.append(_dft(entries))
    lines.append(f"`{COMMAND}`; `docs/results/gpu_model.json` has the times of every path.")
    return "\n".join(lines)


def _bar(entry: dict[str, Any]) -> Bar:
    return Bar(*(entry[name] for name in ("n", "k", "s", "B")), entry["bar"])


def _short(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds < 9_999 else f"{microseconds / 1e3:.1f}k"


def _missed(entries: list[dict[str, Any]]) -> str:
    missed = [entry for entry in entries if not entry["met"]]
    if not missed:
        return f"All {len(entries)} bars are met."
    text = f"**{len(missed)} of {len(entries)} bars are missed** (bold)"
    many = [entry for entry in missed if entry["ratio"] <= entry["bar"]]
    if many:
        text += f", {len(many)} of them by more than 8 launches alone"
    return text + "."


def _ranges(values: list[tuple[dict[str, Any], float]]) -> str:
    """By case: the range over dtypes and machines."""
    cases: dict[str, list[float]] = {}
    for entry, value in values:
        cases.setdefault(str(_bar(entry)), []).append(value)
    return "; ".join(f"{case} {min(found):.2f}–{max(found):.2f}" for case, found in cases.items())


def _without_cuda(entries: list[dict[str, Any]]) -> str:
    others = []
    for entry in entries:
        if entry["path"] == "cuda":
            times = {path: step for path, step in entry["microseconds"].items() if path != "cuda"}
            path = chosen(*(entry[name] for name in ("machine", "dtype", "s", "B", "n")), times)
            others.append((entry, times[path] / entry["compiled"]))
    if not others:
        return "No case takes CUDA C++."
    return f"Where CUDA C++ is not built, the `triton` backend's time over `torch.compile`'s: {_ranges(others)}."


def _dft(entries: list[dict[str, Any]]) -> str:
    added = [(entry, entry["dft"]) for entry in entries if "dft" in entry]
    beyond = sum(value > MOST_OF_DFT for _, value in added)
    verdict = f"**above {MOST_OF_DFT} in {beyond} of {len(added)}**" if beyond else f"nowhere above {MOST_OF_DFT}"
    return f"Time with the DFT part over that without, {verdict}: {_ranges(added)}."


def fill(**texts: str) -> None:
    """Replaces what stands between the marks of the page."""
    page = PAGE.read_text(encoding="utf-8")
    for mark, text in texts.items():
        between = rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
        page = re.sub(between, lambda m, text=text: m[1] + text + "\n" + m[2], page, flags=re.DOTALL)  # type: ignore[misc]
    PAGE.write_text(page, encoding="utf-8")


def write_table(machines: list[str]) -> None:
    """``gpu_paths.json``: the times of all classes of shapes, with k = 50."""
    table = gpu_paths.read(gpu_paths.MODEL)
    for name, device in gpu_paths.ARCHITECTURES.items():
        machine = device.removeprefix("RTX ")
        if machine not in machines:
            continue
        times = {}
        for shape in gpu_paths.all_classes():
            dtype = "bf16" if shape.product == "16-bit" else "tf32"
            found = steps(machine, dtype, shape.labels, 50, shape.slack, shape.rows)
            times[shape] = {path: round(seconds * 1e6, 1) for path, (seconds, _) in found.items()}
            print(name, shape, times[shape], file=sys.stderr, flush=True)
        article = "a" if machine == "H100" else "an"
        table[name] = Times(f"predicted for {article} {device}, not measured", times)
    gpu_paths.MODEL.write_text(gpu_paths.as_json(table), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="write gpu_paths.json instead")
    parser.add_argument(
        "--page", action="store_true", help="fill docs/gpu.md from the saved result, without predicting"
    )
    parser.add_argument("--others", action="store_true", help="predict column losses, top-m and logits alone")
    parser.add_argument("--machine", nargs="*", default=["A100", "H100", "4090"])
    a = parser.parse_args()
    if a.table:
        write_table(a.machine)
        return
    if not a.page:
        entries = json.loads(RESULT.read_text(encoding="utf-8"))["entries"] if a.others else predict_steps(a.machine)
        parts = {"entries": entries, "others": predict_others(a.machine)}
        texts = (
            f'"{name}": [\n' + ",\n".join(" " + json.dumps(e) for e in part) + "\n]" for name, part in parts.items()
        )
        RESULT.write_text(f'{{"command": {json.dumps(COMMAND)}, {", ".join(texts)}}}\n', encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    fill(gpu=page(result["entries"]), others=page_of_others(result["others"]))


if __name__ == "__main__":
    main()
