"""Radii of heads with codes, of trained layers with as many columns and of random-like ones, for ``bench_verify.py codes``."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verify_layers import layer

from sigkernels import DFTHead
from sigkernels.verify import verify

LABELS = 11_732


def coded_head(k: int, slack: int) -> DFTHead:
    """A DFT head with 256 codes and random slack."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DFTHead(2 * k + 1 + 256 + slack, LABELS, k, slack, codes=256)


def random_sets(n: int, size: int, count: int) -> list[np.ndarray]:
    """The same sets in every run."""
    draw = np.random.default_rng(0)
    return [np.sort(draw.choice(n, size, replace=False)) for _ in range(count)]


def measured(case: str, classifier: Any, sets: list[np.ndarray], **options: Any) -> dict:
    """Milliseconds of processor time per set, verdicts alone and with radii."""
    verify(classifier, sets[:1], radius=True, **options)  # page in
    row: dict[str, Any] = {"case": case, "labels": float(np.mean([len(s) for s in sets])), "sets": len(sets)}
    for what in ("verdict", "radius"):
        began = time.process_time()
        report = verify(classifier, sets, radius=what == "radius", **options)
        row[f"{what} ms"] = 1e3 * (time.process_time() - began) / len(sets)
    row |= {"widest gap": float(np.max((report.radius_hi - report.radius_lo) / report.radius_hi))}
    row |= {"radius": float(np.median(report.radius_lo)), "proved": bool(report.check())}
    row["linear programs"] = sum(stage.taken for stage in report.stages if "lp" in stage.name)
    print(json.dumps(row), flush=True)
    return row


def compare_codes(labels: list[int], count: int) -> list[dict]:
    """Heads with codes, and as many gaussian columns beside a constant one."""
    gaussian = np.random.default_rng(0).standard_normal((LABELS, 256)) / 16
    classifiers = {f"k={k}, 256 codes, {slack} slack": coded_head(k, slack) for k, slack in ((0, 0), (0, 25), (80, 25))}
    classifiers["constant, 256 gaussian"] = np.column_stack([np.full(LABELS, LABELS**-0.5), gaussian])
    return [
        measured(case, classifier, random_sets(LABELS, size, count))
        for case, classifier in classifiers.items()
        for size in labels
    ]


def compare_trained(labels: list[int], count: int, cache: Path) -> list[dict]:
    """Trained layers with as many columns as these heads: random sets, and held-out ones; those that are possible."""
    rows = []
    for columns in (257, 282, 442):
        weight, held_out = layer("trained", LABELS, columns, cache=cache)
        weight = weight.astype(np.float64)
        asked = {
            "random": [s for size in labels for s in random_sets(LABELS, size, count)],
            "held-out": held_out[: 2 * count],
        }
        for name, sets in asked.items():
            verdicts = verify(weight, sets).verdicts
            possible = [s for s, verdict in zip(sets, verdicts, strict=True) if verdict == "ARGMAXABLE"][:count]
            rows.append(measured(f"trained, {columns} columns, {name} sets", weight, possible))
    return rows


def compare_rules(count: int) -> list[dict]:
    """Gaussian layers of 3,000 labels under other rules, and with a bias."""
    wide, narrow = (np.random.default_rng(0).standard_normal((3000, d)) / 24 for d in (600, 300))
    return [
        measured("600 gaussian, argmax", wide, random_sets(3000, 1, count), rule="argmax"),
        measured("600 gaussian, topk", wide, random_sets(3000, 3, count), rule="topk"),
        measured("300 gaussian, bias -3", narrow, random_sets(3000, 3, count), bias=np.full(3000, -3.0)),
    ]
