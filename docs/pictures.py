"""Draws the pictures of the documents from saved runs and writes their tables.

    python docs/pictures.py                                  # from docs/results/*.json
    python docs/pictures.py --bench bench/out/report.json    # keeps that run as docs/results/bench.json first
    python docs/pictures.py --demo demo.json                 # and this one, of sigkernels demo --json

``bench.json`` comes from ``sigkernels bench``, ``demo.json`` from ``sigkernels demo --json``, ``reference.json`` from
``python bench/reference.py`` and ``reference_losses.json`` from ``python bench/reference_losses.py``. Pictures go to
docs/img; tables go between ``<!-- name -->`` and ``<!-- /name -->`` in README.md, docs/choosing.md and docs/losses.md.
A run that is not saved leaves its table as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "docs" / "results", ROOT / "docs" / "img"
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import plots  # noqa: E402
import report  # noqa: E402

from sigkernels import env, htmlreport  # noqa: E402

COLUMNS = {
    "n = 8,921, k = 80, slack 50": "n=8921 k=80 s=50 B=64",
    "n = 100,000, k = 50, slack 64": "n=100000 k=50 s=64 B=64",
    "n = 1,000,000, k = 50, slack 64": "n=1000000 k=50 s=64 B=64",
}
# line of the table: (group before the case, peers whose factors it shows)
LINES = {
    "BCE: eager torch, DFT as a frozen buffer": ("fused loss, ", ("eager, frozen DFT",)),
    "BCE: eager `F.linear` of the slack alone, *no DFT part*": ("fused loss, ", ("eager, no DFT",)),
    "BCE: the same, `torch.compile`": ("fused loss, ", ("compiled, no DFT",)),
    "focal: eager / compiled": ("Focal, ", ("eager, frozen DFT", "compiled, frozen DFT")),
    "asymmetric: eager / compiled": ("Asymmetric, ", ("eager, frozen DFT", "compiled, frozen DFT")),
    "sigmoidF1: eager / compiled": ("sigmoidF1, ", ("eager, frozen DFT", "compiled, frozen DFT")),
    "sigmoidF1, pooled: eager / compiled": ("sigmoidF1, pooled, ", ("eager, frozen DFT", "compiled, frozen DFT")),
    "top 10 labels: eager linear + `torch.topk`": ("top 10, ", ("eager linear + torch.topk",)),
}
# (line, whether the peer computes the DFT part too)
FASTEST = {
    "BCE: the fastest peer that computes the same layer": True,
    "BCE: the fastest peer with the slack alone, *no DFT part*": False,
}
LML = "published bracketing, 10 branches, eps 1e-4"


def machine(environment: dict[str, Any]) -> str:
    cpu, threads = environment["cpu"], environment["threads"]["torch"]
    about = f"{threads} thread" if threads == 1 else f"{threads} threads"
    return f"{cpu['model']} ({', '.join(cpu['isa'])}), {about}, torch {environment['packages']['torch']}"


def keep(path: Path, name: str) -> None:
    """Saves a run under docs/results, without what only its machine cares about."""
    run = json.loads(path.read_text(encoding="utf-8"))
    run["environment"] = env.summary(run["environment"])
    run["command"] = re.sub(r" --output \S+", "", run["command"])
    for result in run.get("results", []):
        result.pop("losses", None)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / name).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def save(figure: Any, name: str, run: dict[str, Any]) -> None:
    """Writes docs/img/<name>.svg with the command and the machine below the picture."""
    figure.supxlabel(f"{run['command']}\n{machine(run['environment'])}", fontsize=7.5, color="#5a6772")
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None}, facecolor="white")


def fill(document: str, name: str, text: str) -> None:
    """Replaces what stands between the marks of ``name``."""
    path = ROOT / document
    before = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(before):
        raise SystemExit(f"{document} has no <!-- {name} --> … <!-- /{name} -->")
    path.write_text(pattern.sub(lambda m: m[1] + text.rstrip() + "\n" + m[2], before), encoding="utf-8")


def source(run: dict[str, Any]) -> str:
    note = f" {run['note']}" if "note" in run else ""
    return f"`{run['command']}`; {machine(run['environment'])}.{note}"


# -- the benchmark run ----------------------------------------------------------------------------------------------


def bench(run: dict[str, Any]) -> None:
    records = [report.Record(**record) for record in run["records"]]
    drawings: dict[str, Callable[[Any], Any]] = {
        "ratios": plots.ratios, "memory": plots.memory, "roofline": plots.roofline, "scaling": plots.scaling
    }  # fmt: skip
    for name, draw in drawings.items():
        figure = draw(records)
        if figure is None:
            raise SystemExit(f"the saved run has nothing for {name}.svg: run all suites, sigkernels bench")
        save(figure, name, run)
    fill("README.md", "ratios", ratio_table(run["factors"]) + "\n\n" + source(run))


def ratio_table(factors: dict[str, dict[str, float | None]]) -> str:
    """The factors of ``LINES``, of the fastest peers and of LML, by number of labels."""
    lines = ["| loss and alternative | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]

    def cell(group: str, peers: tuple[str, ...]) -> str:
        found = [factors.get(group, {}).get(peer) for peer in peers]
        return " / ".join("–" if factor is None else f"{factor:.1f}×" for factor in found).replace("– / –", "–")

    def fastest(group: str, with_dft: bool) -> str:
        peers = {
            who: f for who, f in factors.get(group, {}).items() if ("frozen" in who) == with_dft and who != plots.OURS
        }
        if not peers:
            return "–"
        who = min(peers, key=lambda who: peers[who] or math.inf)
        return f"{peers[who]:.1f}× ({who.partition(', ')[0]})"

    for title, with_dft in FASTEST.items():
        lines.append(
            f"| {title} | " + " | ".join(fastest(f"fused loss, {c}", with_dft) for c in COLUMNS.values()) + " |"
        )
    for title, (prefix, peers) in LINES.items():
        lines.append(f"| {title} | " + " | ".join(cell(prefix + case, peers) for case in COLUMNS.values()) + " |")
    sizes = ("8,921", "100,000", "1,000,000")
    cells = [cell(f"LML forward + backward, n={n}, rows=256, k=10", (LML,)) for n in sizes]
    lines.append("| LML, 256 rows: the published bracketing | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# -- the trained heads ----------------------------------------------------------------------------------------------


KINDS = {
    "full": ("full `nn.Linear`", plots.GREY),
    "bottleneck": ("bottleneck of {}", plots.RED),
    "dft": ("DFT, slack {}", plots.TEAL),
    "codes": ("DFT + 256 codes, slack {}", plots.BLUE),
}
LABELS = {"full": "full nn.Linear", "bottleneck": "bottleneck", "dft": "DFT head", "codes": "DFT head with codes"}


def _last(runs: dict[str, Any], key: str) -> str:
    """Mean ± standard deviation over the seeds, of a value or of the last of its list."""
    values = [run[key][-1] if isinstance(run[key], list) else run[key] for run in runs.values() if key in run]
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def _impossible(verdicts: dict[str, int]) -> str:
    thin = f", {verdicts['THIN']} thin" if verdicts.get("THIN") else ""
    return f"{verdicts.get('UNARGMAXABLE', 0)} of {sum(verdicts.values())}{thin}"


def _radii(runs: Iterable[dict[str, Any]]) -> str:
    """What the columns on verdicts mean."""
    count = max(len(run["radii"]) for run in runs)
    thin = "Thin: possible, by a region narrower than 1e-8."
    return f"{thin} Radii of {count} of the sets."


def _mean(runs: dict[str, Any]) -> float:
    return statistics.mean(run["f1_at_5"][-1] for run in runs.values())


def reference(run: dict[str, Any]) -> None:
    by_prior: dict[str, dict[tuple[str, int], Any]] = {}
    for name, runs in run["heads"].items():
        kind, width, prior = name.split(":")
        by_prior.setdefault(prior, {})[kind, int(width)] = runs
    heads = by_prior["frequencies"]
    _draw_scores(heads, run)
    _draw_radii(heads, run)
    lines = [
        "| head | parameters | seeds | F1@5 | F1@10 | mAP | never predictable | smallest / median radius |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (kind, width), runs in sorted(heads.items(), key=lambda item: (item[0][1], list(KINDS).index(item[0][0]))):
        first = runs["0"]
        never, verified, radii = "not verified", sum(first["verdicts"].values()), "–"
        if verified:
            never = _impossible(first["verdicts"])
            radii = f"{min(first['radii']):.2g} / {statistics.median(first['radii']):.2g}"
        lines.append(
            f"| {KINDS[kind][0].format(width)} | {first['head_parameters'] / 1e6:.2f} M | {len(runs)} | "
            f"{_last(runs, 'f1_at_5')} | {_last(runs, 'f1_at_10')} | {_last(runs, 'map')} | {never} | {radii} |"
        )
    epochs = first["epochs"]
    note = f"{epochs} epochs, mean ± deviation; verdicts and radii of the first seed. "
    note += f"{_radii(runs['0'] for runs in heads.values())} "
    fill("docs/choosing.md", "reference", "\n".join(lines) + f"\n\n{note}" + source(run))

    narrow = [key for key in heads if key[1] in (0, 25)]
    priors = [prior for prior in PRIORS if prior in by_prior]
    lines = ["| head | " + " | ".join(f"prior: {prior}" for prior in priors) + " |", "|---" * (len(priors) + 1) + "|"]
    for key in narrow:
        cells = [_last(by_prior[prior][key], "f1_at_5") if key in by_prior[prior] else "–" for prior in priors]
        lines.append(f"| {KINDS[key[0]][0].format(key[1])} | " + " | ".join(cells) + " |")
    note = f"F1@5, {epochs} epochs, three seeds, mean ± deviation: "
    fill("docs/choosing.md", "prior", "\n".join(lines) + f"\n\n{note}" + source(run))


PRIORS = ("none", "mean", "frequencies")


def _draw_scores(heads: dict[tuple[str, int], Any], run: dict[str, Any]) -> None:
    """What a bottleneck rules out, and F1 against parameters."""
    widths = sorted({width for _, width in heads if width})
    figure, (left, right) = _two_axes()
    for kind in list(KINDS)[1:]:
        runs = [heads[kind, width] for width in widths]
        colour = KINDS[kind][1]
        verified = [(width, r["0"]) for width, r in zip(widths, runs, strict=True) if r["0"]["verdicts"]]
        shares = [100 * r["impossible_share"] for _, r in verified]
        left.plot([width for width, _ in verified], shares, "o-", color=colour, label=LABELS[kind])
        right.plot([r["0"]["head_parameters"] / 1e6 for r in runs], [_mean(r) for r in runs], "o-", color=colour)
        if kind == "bottleneck":
            for width, share in zip(widths, shares, strict=True):
                left.annotate(f"{share:.1f} %", (width, share), xytext=(6, 4), textcoords="offset points", fontsize=8)
    full = heads["full", 0]
    right.plot([full["0"]["head_parameters"] / 1e6], [_mean(full)], "s", color=plots.GREY, label=LABELS["full"])
    left.set(xlabel="learned columns", ylabel="test sets proved unpredictable, %", ylim=(-1, None), xticks=widths)
    right.set(xlabel="parameters of the head, millions", ylabel="F1@5 on the test set", xscale="log")
    right.set_xticks([0.3, 0.5, 1, 2, 6], ["0.3", "0.5", "1", "2", "6"])
    right.minorticks_off()
    htmlreport.legend(figure, columns=4)
    save(figure, "unargmaxable", run)


def _draw_radii(heads: dict[tuple[str, int], Any], run: dict[str, Any]) -> None:
    """How wide the regions of random sets are, by their size."""
    figure, both = _two_axes()
    drawn = [
        w
        for w in sorted({w for _, w in heads})
        if w and all(heads[k, w]["0"]["radius_by_size"] for k in list(KINDS)[1:])
    ]
    for axes, width in zip(both, (drawn[0], drawn[-1]), strict=True):
        for kind in list(KINDS)[1:]:
            radii = heads[kind, width]["0"]["radius_by_size"]
            sizes = [int(size) for size in radii]
            floor = [max(statistics.median(values), 1e-12) for values in radii.values()]
            axes.plot(sizes, floor, "o-", color=KINDS[kind][1], label=LABELS[kind] if width == drawn[0] else None)
        axes.set(xlabel="labels in the set", xscale="log", yscale="log", xticks=sizes, xticklabels=sizes)
        axes.set_title(f"{width} learned columns", fontsize=9)
        axes.minorticks_off()
    both[0].set(ylabel="median radius (1e-12: none, or thinner)")
    htmlreport.legend(figure, columns=3)
    save(figure, "radius", run)


def losses(run: dict[str, Any]) -> None:
    columns = ("P@5", "mAP", *(f"{a}_f1 at {cut}" for cut in ("best", "0.5") for a in ("micro", "macro", "weighted")))
    titles = ("P@5", "mAP", *(f"{a} F1, {cut}" for cut in ("best", "0.5") for a in ("micro", "macro", "weighted")))
    lines = ["| loss | seeds | " + " | ".join(titles) + " |", "|---" * (len(titles) + 2) + "|"]
    for name, runs in run["losses"].items():
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(_last(runs, column) for column in columns) + " |")
    epochs = next(iter(runs.values()))["epochs"]
    fill("docs/losses.md", "losses", "\n".join(lines) + f"\n\n{epochs} epochs, mean ± deviation: " + source(run))


def _two_axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    both = figure.subplots(1, 2)
    for axes in both:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, axis="y", color="#e3e8ec", linewidth=0.8)
    return figure, both


def demo(run: dict[str, Any]) -> None:
    titles = (
        "head",
        "parameters",
        "F1@5",
        "F1@10",
        "mAP",
        "training step",
        "peak memory of the head",
        "never predictable",
        "smallest / median radius",
    )
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for result in run["results"]:
        peak, never, radii = result["head_peak_bytes"], _impossible(result["verdicts"]), result["radii"]
        lines.append(
            f"| {result['description']} | {result['head_parameters'] / 1e6:.2f} M | {result['f1_at_5'][-1]:.3f} | "
            f"{result['f1_at_10'][-1]:.3f} | {result['mean_average_precision']:.3f} | {result['step_ms']:.0f} ms | "
            f"{'–' if peak is None else f'{peak / 2**20:.0f} MiB'} | {never} | "
            f"{min(radii):.2g} / {statistics.median(radii):.2g} |"
        )
    about = f"{run['epochs']} epochs, {run['train_examples']:,} training and {run['test_examples']:,} test packages, "
    about += f"{run['seconds']:.0f} s in all. {_radii(run['results'])} "
    fill("README.md", "demo", "\n".join(lines) + "\n\n" + about + source(run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, metavar="FILE", help="a report.json of sigkernels bench to keep")
    parser.add_argument("--demo", type=Path, metavar="FILE", help="the output of sigkernels demo --json to keep")
    args = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    for given, name in ((args.bench, "bench.json"), (args.demo, "demo.json")):
        if given is not None:
            keep(given, name)
    runs = {"bench.json": bench, "demo.json": demo, "reference.json": reference, "reference_losses.json": losses}
    for name, make in runs.items():
        if (RESULTS / name).exists():
            make(json.loads((RESULTS / name).read_text(encoding="utf-8")))
            print(f"docs/results/{name}: done")
        else:
            print(f"docs/results/{name}: not saved, its table stays as it is")


if __name__ == "__main__":
    main()
