"""The verifier against what people use: scipy's HiGHS on the full Chebyshev program of each label set.

    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 python bench/bench_verify.py speed
    … bench_verify.py radius | codes | throughput | bottleneck | slack | published | classes | thin

Both sides run in one process, interleaved, one BLAS thread, and are measured in seconds of processor time, which other
programs on the machine do not lengthen. HiGHS gets a few sets (it takes seconds for each), the verifier many; what is
compared is the time per set. HiGHS runs at tolerance 1e-10, its minimum: with the default of 1e-7 its answers at radius
1e-8 mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from scipy.optimize import linprog  # noqa: E402
from scipy.stats import binom  # noqa: E402
from verify_codes import compare_codes, compare_rules, compare_trained  # noqa: E402
from verify_layers import CACHE, layer  # noqa: E402
from verify_margins import PEERS, compare_margins  # noqa: E402

from sigkernels import DFTHead  # noqa: E402
from sigkernels.verify import verify, verify_classes  # noqa: E402

OUT = Path(__file__).parent / "out"
QUICK = bool(os.environ.get("SIGKERNELS_BENCH_QUICK"))


def highs(W: np.ndarray, active: np.ndarray, box: float = 1e4) -> tuple[float, float | None]:
    """Seconds and radius of the full program for one set, as scipy solves it."""
    n, d = W.shape
    y = np.full(n, -1.0)
    y[active] = 1.0
    rows = np.concatenate([-y[:, None] * W, np.linalg.norm(W, axis=1)[:, None]], axis=1)
    objective = np.zeros(d + 1)
    objective[-1] = -1
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10, "time_limit": 60.0}
    began = time.process_time()
    bounds = [(-box, box)] * d + [(None, None)]
    result = linprog(objective, rows, np.zeros(n), bounds=bounds, method="highs-ds", options=options)
    return time.process_time() - began, None if result.x is None else float(result.x[-1])


def distinct(sets: list, count: int) -> list:
    """The first ``count`` different sets: repeats would flatter the verifier."""
    return [np.array(s) for s in list(dict.fromkeys(tuple(map(int, s)) for s in sets))[:count]]


def compare(name: str, classifier, W: np.ndarray, sets: list, baseline: int, radius: bool = False) -> dict:
    """Time per set of both sides, interleaved: half of HiGHS's sets before the verifier, half after."""
    verify(classifier, sets[:2], radius=radius)  # page in
    slow = [highs(W, s)[0] for s in sets[: (baseline + 1) // 2]]
    began = time.process_time()
    report = verify(classifier, sets, radius=radius)
    seconds = time.process_time() - began
    slow += [highs(W, s)[0] for s in sets[(baseline + 1) // 2 : baseline]]
    before_lp = sum(s.decided for s in report.stages if s.name not in ("lp", "exact", "radius", "radius lp"))
    thin = report.counts()["THIN"]
    row = {
        "case": name,
        "sets": len(sets),
        "ms per set": 1e3 * seconds / len(sets),
        "highs ms": 1e3 * float(np.median(slow)),
        "ratio": float(np.median(slow)) / (seconds / len(sets)),
        "decided before the programs": (before_lp + (thin if report.question.k >= 0 else 0)) / len(sets),
        **{k: v for k, v in report.counts().items() if v},
    }
    if radius:
        row["closed"] = float(np.mean(report.radius_hi - report.radius_lo <= 1e-6 * report.radius_hi))
    print(
        f"{name:<28} {row['ms per set']:9.2f} ms   HiGHS {row['highs ms']:9.0f} ms   {row['ratio']:6.0f}x   "
        f"decided early {100 * row['decided before the programs']:.1f}%   "
        + ", ".join(f"{k} {v}" for k, v in report.counts().items() if v)
        + (f"   closed {100 * row['closed']:.1f}%" if radius else ""),
        flush=True,
    )
    return row


def dft_head(n: int, k: int, slack: int, seed: int = 0):
    """A DFT head with random slack, and its float64 matrix."""
    import torch

    import sigkernels as sk

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = sk.DFTHead(2 * k + 1 + slack, n, k, slack)
    return head, head.weight_matrix(torch.float64).numpy()


def speed(args: argparse.Namespace) -> list[dict]:
    """Time per set on trained and gaussian layers, and on DFT heads with slack."""
    rows = []
    for n in args.n:
        for d in args.d:
            for kind in args.kinds:
                if kind in ("trained", "gaussian"):
                    W, sets = layer(kind, n, d, args.data, args.cache)
                    W = W.astype(np.float64)
                    sets = distinct(sets, args.sets)
                    rows.append(compare(f"{kind} n={n} d={d}", W, W, sets, args.baseline))
        if "dft" in args.kinds:
            _, sets = layer("gaussian", n, 1, args.data, args.cache)
            head, W = dft_head(n, 80, args.slack)
            rows.append(
                compare(f"dft n={n} k=80 slack={args.slack}", head, W, distinct(sets, args.sets), args.baseline)
            )
    return rows


def radius(args: argparse.Namespace) -> list[dict]:
    """The exact radius against the full program. Sets are argmaxable, so that there is a radius."""
    rows = []
    for n in args.n:
        for d in args.d if "trained" in args.kinds else ():
            W, sets = layer("trained", n, d, args.data, args.cache)
            W = W.astype(np.float64)
            sets = distinct(sets, 60)
            yes = [s for s, v in zip(sets, verify(W, sets).verdicts, strict=True) if v == "ARGMAXABLE"][: args.sets]
            rows.append(compare(f"radius n={n} d={d}", W, W, yes, args.baseline, radius=True))
        if "dft" in args.kinds:
            _, sets = layer("gaussian", n, 1, args.data, args.cache)
            head, W = dft_head(n, 80, args.slack)
            name = f"radius dft n={n} k=80 slack={args.slack}"
            rows.append(compare(name, head, W, distinct(sets, args.sets), args.baseline, radius=True))
    return rows


def codes(args: argparse.Namespace) -> list[dict]:
    """Heads with codes, random sets of ``--labels`` labels; trained layers as wide; random-like layers under other rules."""
    rows = compare_codes(args.labels, args.sets) + compare_trained(args.labels, args.sets, args.cache)
    return rows + compare_rules(min(args.sets, 9))


def margin(args: argparse.Namespace) -> list[dict]:
    """Margins on the unit l2 ball against quadratic programs, argmaxable sets of layers trained for ``--steps``."""
    rows = []
    for n in args.n:
        for d in args.d:
            W, sets = layer("trained", n, d, args.data, args.cache, args.steps)
            W = W.astype(np.float64)
            sets = distinct(sets, 60)
            yes = [s for s, v in zip(sets, verify(W, sets).verdicts, strict=True) if v == "ARGMAXABLE"][: args.sets]
            rows.append(compare_margins(f"margin n={n} d={d}", W, yes, args.baseline, args.peers))
    return rows


def throughput(args: argparse.Namespace) -> list[dict]:
    """3000 sets at n = 8921, d = 50, and all of them checked again."""
    W, sets = layer("trained", 8921, 50, args.data, args.cache)
    began = time.process_time()
    report = verify(W, sets[:3000])
    seconds = time.process_time() - began
    began = time.process_time()
    ok = report.check()
    print(f"3000 sets: {seconds:.1f} s; {ok} in {time.process_time() - began:.1f} s")
    print(report.summary())
    return [{"sets": 3000, "seconds": seconds, "check seconds": time.process_time() - began, "checked": bool(ok)}]


def bottleneck(args: argparse.Namespace) -> list[dict]:
    """The first paper's picture: the share of unargmaxable test sets against the width of a trained bottleneck."""
    rows = []
    for d in args.d:
        W, sets = layer("trained", args.n[0], d, args.data, args.cache)
        report = verify(W, sets[: args.sets])
        share = report.counts()["UNARGMAXABLE"] / len(report)
        rows.append({"d": d, "sets": len(report), "unargmaxable": share, "checked": bool(report.check())})
        print(f"d={d:4d}  {100 * share:6.2f}% of {len(report)} test sets are unargmaxable", flush=True)
    _plot_bottleneck(rows, args.n[0])
    return rows


def with_published_slack(head, rng: np.random.Generator | np.random.RandomState):
    """The head in float64 with slack as the published script of the sigmoid-bottleneck paper draws it: U(-1, 0.1)/√n."""
    import torch

    head = head.double()
    drawn = rng.uniform(-1.0, 0.1, tuple(head.slack_weight.shape)) / np.sqrt(head.num_labels)
    with torch.no_grad():
        head.slack_weight.copy_(torch.from_numpy(drawn))
    return head


def percentile(values: np.ndarray, share: float = 0.01) -> tuple[float, float, float]:
    """A percentile of random values and its 95 % confidence interval: between two of the values, by their ranks."""
    ordered = np.sort(values)
    first, last = binom.ppf([0.025, 0.975], len(ordered), share).astype(int)
    low, high = ordered[max(first - 1, 0)], ordered[min(last, len(ordered) - 1)]
    return float(np.quantile(ordered, share)), float(low), float(high)


def slack(args: argparse.Namespace) -> list[dict]:
    """The second picture: the 1st percentile of the radius against n, without and with 16 slack columns."""
    rows = []
    rng = np.random.default_rng(0)
    for n in (100, 300, 1000, 3000, 10_000):
        for k in (1, 2, 3):
            sets = [np.sort(rng.choice(n, k, replace=False)) for _ in range(args.sets)]
            for columns in (0, 16):
                head, _ = dft_head(n, k, columns)
                if columns and not args.head_slack:
                    head = with_published_slack(head, rng)
                report = verify(head, sets, radius=True)
                p1, low, high = percentile(report.radius_lo)
                row = {"n": n, "k": k, "slack": columns, "p1": p1, "p1 low": low, "p1 high": high}
                row |= {"p50": float(np.median(report.radius_lo)), "checked": bool(report.check())}
                row["widest gap"] = float(np.max((report.radius_hi - report.radius_lo) / report.radius_hi))
                rows.append(row)
                print(json.dumps(row), flush=True)
    _plot_slack(rows)
    return rows


def published(args: argparse.Namespace) -> list[dict]:
    """The published radii at n = 10000 with 16 slack columns, against what samples of the script's 100 sets give.

    Slack and sets are drawn with the script's generator and seed.
    """
    rows, draw = [], np.random.default_rng(0)
    for k, value in ((1, 2.2e2), (2, 0.15), (3, 8.7e-4)):
        head = with_published_slack(dft_head(10_000, k, 16)[0], np.random.RandomState(12))
        rng = np.random.RandomState(12)
        sets = [np.sort(rng.choice(10_000, k, replace=False)) for _ in range(args.sets)]
        radii = verify(head, sets, radius=True).radius_lo.astype(float)
        samples = np.array([np.percentile(draw.choice(radii, 100, replace=False), 1) for _ in range(20_000)])
        low, median, high = np.quantile(samples, [0.025, 0.5, 0.975])
        row = {"k": k, "published": value, "sets": args.sets, "p1": float(np.percentile(radii, 1))}
        row |= {"p1 of 100, 95 %": (low, high), "p1 of 100, median": median}
        row |= {"sets below": float(np.mean(radii < value)), "samples below": float(np.mean(samples < value))}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _figure():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(6, 4), layout="constrained")


def classes(args: argparse.Namespace) -> list[dict]:
    """Every class of a softmax: of ``--matrix``, or of a gaussian one of the first ``--n`` and ``--d``.

    ``--classes``: only as many, spread over all of them, against every row.
    """
    gaussian = np.random.default_rng(0).standard_normal((args.n[0], args.d[0]))
    W = gaussian if args.matrix is None else np.load(args.matrix)
    count = len(W) if args.classes is None else args.classes
    some = [[int(i)] for i in np.linspace(0, len(W) - 1, count).astype(int)]
    began = time.process_time()
    report = verify_classes(W) if count == len(W) else verify(W, some, rule="argmax")
    seconds = time.process_time() - began
    began = time.process_time()
    proved = bool(report.check())
    row = {"n": W.shape[0], "d": W.shape[1], "classes": count, "seconds": seconds}
    row |= {"check": time.process_time() - began, "proved": proved}
    row["peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    print(row | report.counts())
    return [row | report.counts()]


def thin(args: argparse.Namespace) -> list[dict]:
    """20 random sets of up to 60 labels of a large DFT head: n = 100,000, k = 80, 64 slack columns."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    head = DFTHead(225, 100_000, 80, 64)
    sets = [np.sort(rng.choice(100_000, int(rng.integers(1, 61)), replace=False)) for _ in range(20)]
    began = time.process_time()
    report = verify(head, sets)
    row = {"seconds per set": (time.process_time() - began) / len(sets), **report.counts()}
    print(row)
    return [row]


def _plot_bottleneck(rows: list[dict], n: int) -> None:
    figure, axis = _figure()
    axis.plot([r["d"] for r in rows], [100 * r["unargmaxable"] for r in rows], marker="o", color="#c0392b")
    axis.set(xscale="log", xlabel="bottleneck width d", ylabel="unargmaxable test sets [%]", ylim=(0, None))
    axis.set_title(f"Trained bottleneck, n = {n} labels")
    figure.savefig(OUT / "verify_bottleneck.png", dpi=150)


def _plot_slack(rows: list[dict]) -> None:
    figure, axis = _figure()
    for k, colour in ((1, "#2a78b5"), (2, "#e08a1e"), (3, "#c0392b")):
        for columns, style in ((0, "-"), (16, "--")):
            mine = [r for r in rows if r["k"] == k and r["slack"] == columns]
            at = [r["n"] for r in mine]
            axis.plot(at, [r["p1"] for r in mine], style, color=colour, marker=".", label=f"k={k}, slack {columns}")
            axis.fill_between(
                at, [r["p1 low"] for r in mine], [r["p1 high"] for r in mine], color=colour, alpha=0.15, linewidth=0
            )
    axis.set(xscale="log", yscale="log", xlabel="labels n", ylabel="radius, 1st percentile")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axis.set_title(f"DFT heads with {min(r['n'] for r in rows):,} to {max(r['n'] for r in rows):,} labels")
    figure.savefig(OUT / "verify_slack.png", dpi=150)


@pytest.mark.parametrize("d", [25] if QUICK else [25, 100])
@pytest.mark.parametrize("who", ["sigkernels", "scipy HiGHS, full program"])
def test_verify(benchmark, who: str, d: int) -> None:
    """What `sigkernels bench` runs: the same few sets on both sides, one thread."""
    n, count = (2000, 4) if QUICK else (8921, 16)
    W, sets = layer("gaussian", n, d)
    sets = distinct(sets, count)

    def work() -> None:
        if who == "sigkernels":
            verify(W, sets)
        else:
            for active in sets:
                highs(W, active)

    benchmark.group = f"verify {count} label sets, n={n:,}, d={d}, gaussian W"
    benchmark.extra_info.update(who=who, n=n, rows=count)
    benchmark.pedantic(work, rounds=5 if who == "sigkernels" else 1, warmup_rounds=1 if who == "sigkernels" else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=(
            "speed",
            "radius",
            "codes",
            "margin",
            "throughput",
            "bottleneck",
            "slack",
            "published",
            "classes",
            "thin",
        ),
    )
    parser.add_argument("--n", type=int, nargs="+", default=[8921, 20_000])
    parser.add_argument("--d", type=int, nargs="+", default=[25, 50, 100, 200])
    parser.add_argument("--kinds", nargs="+", default=["trained", "gaussian", "dft"])
    parser.add_argument("--slack", type=int, default=100, help="slack columns of the DFT head")
    parser.add_argument("--head-slack", action="store_true", help="slack as the head initialises it, in its picture")
    parser.add_argument("--sets", type=int, default=128, help="label sets for the verifier")
    parser.add_argument("--baseline", type=int, default=3, help="label sets for HiGHS")
    parser.add_argument("--labels", type=int, nargs="+", default=[4], help="of the sets of codes")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS), help="solvers for margin")
    parser.add_argument("--matrix", type=Path, help=".npy file with the matrix [classes, features] of classes")
    parser.add_argument("--steps", type=int, default=250, help="of training, for the layers of margin")
    parser.add_argument("--classes", type=int, help="of classes: only this many of them")
    parser.add_argument("--data", help="debian_deps.npz (default: the one in the package)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where trained layers are kept")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    rows = globals()[args.what](args)
    (OUT / f"verify_{args.what}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
