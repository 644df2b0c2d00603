"""The largest balls of matrices of which as many rows touch a ball as there are features."""

from __future__ import annotations

import numpy as np
import pytest
from fuzz_verify import QUESTIONS, Case, campaign
from scipy.optimize import linprog, minimize

from sigkernels.codes import code_matrix
from sigkernels.verify import verify
from sigkernels.verify.input_ball import Box
from sigkernels.verify.solvers import largest_balls, moving_rows, soft_margin
from sigkernels.verify.solvers.ball_batch import Batch, Item
from sigkernels.verify.solvers.largest_balls import balls
from sigkernels.verify.solvers.moving_rows import on_moving_rows
from sigkernels.verify.solvers.soft_margin import soft_balls

strict = pytest.importorskip("array_api_strict")
N, D, SIZE = 500, 65, 10.0
TIGHT = {"maxiter": 5000, "maxfun": 20_000, "ftol": 1e-15, "gtol": 1e-10}


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def constant_and(rows):
    return unit(np.column_stack([np.full(len(rows), 0.3), rows]))


draw = np.random.default_rng(0)
MATRICES = {
    "gaussian": constant_and(draw.standard_normal((N, D - 1)) / 8),
    "codes": constant_and(code_matrix(N, 64).numpy()),  # thousands of ties
    "twins": constant_and(np.repeat(draw.standard_normal((N // 2, D - 1)) / 8, 2, axis=0)),
    "low rank": constant_and(draw.standard_normal((N, 20)) @ draw.standard_normal((20, D - 1)) / 30),
    "few rows": constant_and(draw.standard_normal((80, D - 1)) / 8),
    "at the edge": unit(draw.standard_normal((N, D)) - 0.5),
}


def items_of(rows, sizes, start=True):
    draw = np.random.default_rng(sizes)
    lists = [np.sort(draw.choice(len(rows), size, replace=False)) for size in sizes]
    x = -SIZE * np.eye(1, rows.shape[1])[0] if start else None
    return [Item(i, active, x) for i, active in enumerate(lists)]


def batch_of(xp, rows, offset, items):
    everything = xp.asarray(rows)
    shift = None if offset is None else xp.asarray(offset / SIZE)
    return Batch(xp, everything, shift, Box(SIZE), items, xp.astype(everything, xp.float32))


def program(rows, offset, active):
    """The radius by the full linear program."""
    n, d = rows.shape
    y = np.where(np.isin(np.arange(n), active), 1.0, -1.0)
    shift = np.zeros(n) if offset is None else y * offset
    a = np.column_stack([-y[:, None] * rows, np.ones(n)])
    return linprog([0.0] * d + [-1.0], a, shift, bounds=[(-SIZE, SIZE)] * d + [(None, None)]).x[-1]


def bounds(rows, offset, active, ball):
    """What the point and the multipliers of a ball prove."""
    y = np.where(np.isin(np.arange(len(rows)), active), 1.0, -1.0)
    shift = np.zeros(len(rows)) if offset is None else y * offset
    assert np.abs(ball.x).max() <= SIZE and np.all(ball.multipliers > 0)
    slope = (ball.multipliers * y[ball.support]) @ rows[ball.support]
    above = SIZE * np.abs(slope).sum() + ball.multipliers @ shift[ball.support]
    return np.min(y * (rows @ ball.x) + shift), above / ball.multipliers.sum()


@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize("name", MATRICES)
def test_the_balls_are_those_of_the_full_programs(name, biased):
    rows = MATRICES[name]
    offset = 0.1 * np.random.default_rng(1).standard_normal(len(rows)) if biased else None
    items = items_of(rows, (0, 1, 2, 5, 9))
    batch = batch_of(np, rows, offset, items)
    found = {ball.number: ball for ball in on_moving_rows(batch)}
    truths = [program(rows, offset, item.active) for item in items]
    nothing = [item.number for item, truth in zip(items, truths, strict=True) if abs(truth) < 1e-7]
    assert [item.number for item in batch.items] == nothing and len(nothing) < len(items)
    for number, ball in found.items():
        low, high = bounds(rows, offset, items[number].active, ball)
        assert low == pytest.approx(truths[number], rel=1e-6) and high == pytest.approx(truths[number], rel=1e-6)
        assert high - low <= 1.01e-7 * abs(high)


def test_the_standards_names_are_enough():
    rows = MATRICES["codes"]
    items = items_of(rows, (1, 3, 6))
    for xp in (np, strict):
        batch = batch_of(xp, rows, None, items)
        radii = [bounds(rows, None, items[b.number].active, b) for b in on_moving_rows(batch)]
        assert len(radii) == 3 and not batch.items
        for low, high in radii:
            assert low == pytest.approx(high, rel=2e-8)


def objective(rows, y, shift, softness, z):
    x, e = z[:-1], z[-1]
    hinge = np.maximum(e - y * (rows @ x) - shift, 0.0)
    over = np.maximum(np.abs(x) - 1.0, 0.0)
    slope = np.append(over * np.sign(x) - (y * hinge) @ rows, hinge.sum() - softness)
    return 0.5 * (hinge @ hinge + over @ over) - softness * e, slope


@pytest.mark.parametrize("name", ("gaussian", "codes", "few rows"))
def test_soft_balls_minimise_their_objective(name, monkeypatch):
    rows = MATRICES[name]
    offset = 0.2 * np.random.default_rng(1).standard_normal(len(rows))
    batch = batch_of(np, rows, offset, items_of(rows, (1, 4)))
    rough = soft_balls(batch)
    monkeypatch.setattr(soft_margin, "STEPS", 200)
    monkeypatch.setattr(soft_margin, "ENOUGH", 1e-9)
    soft = soft_balls(batch)
    for i, y in enumerate(batch.y):
        value = [
            objective(rows, y, y * batch.offset, part.softness[i], np.append(part.x[i], part.e[i]))[0]
            for part in (rough, soft)
        ]
        args = (rows, y, y * batch.offset, soft.softness[i])
        start = np.append(batch.start[i], 0.0)
        best = minimize(lambda z, args=args: objective(*args, z), start, jac=True, method="L-BFGS-B", options=TIGHT)
        before = objective(*args, start)[0]
        assert value[1] - best.fun <= 1e-4 * (before - best.fun)
        assert value[0] - best.fun <= 0.1 * (before - best.fun)
        np.testing.assert_allclose(soft.margins[i], y * (rows @ soft.x[i] + batch.offset), rtol=1e-6, atol=1e-9)


def test_which_sets_go_there(monkeypatch):
    """Those with one large coordinate at the start, and those that meet few edges of the box in a rough ball."""
    few, moving = [], []
    solve, move = largest_balls._on_few_rows, largest_balls.on_moving_rows
    monkeypatch.setattr(largest_balls, "_on_few_rows", lambda b, *more: few.append(len(b.items)) or solve(b, *more))
    monkeypatch.setattr(largest_balls, "on_moving_rows", lambda b: moving.append(len(b.items)) or move(b))

    def found(rows, items):
        few.clear()
        moving.clear()
        closed = {
            b.number: bounds(rows, None, items[b.number].active, b) for b in balls(np, rows, None, Box(SIZE), items)
        }
        assert len(closed) == len(items)
        return closed

    rows = MATRICES["gaussian"]
    items = items_of(rows, (3, 4, 5))
    want = found(rows, items)
    assert (few, moving) == ([], [3])
    spread = [item._replace(start=np.ones(D)) for item in items]
    for number, radii in found(rows, spread).items():
        np.testing.assert_allclose(radii, want[number], rtol=1e-6)
    assert sum(few) == 3 and 1 <= sum(moving) < 3  # the others are closed in the first round
    monkeypatch.setattr(moving_rows, "STEPS", 2)  # what the method leaves open is solved as before
    for number, radii in found(rows, items).items():
        np.testing.assert_allclose(radii, want[number], rtol=1e-6)
    assert sum(few) == 3 and moving == [3]
    rows = MATRICES["at the edge"]
    found(rows, items_of(rows, (1, 2, 5), start=False))
    assert sum(few) == 3 and moving == []


def test_a_singular_system_loses_one_set_alone(monkeypatch):
    rows = MATRICES["gaussian"]
    items = items_of(rows, (1, 2, 5))
    solver, calls = moving_rows.definite_solver, []

    def third_fails(xp, h):
        calls.append(len(h))
        if len(calls) == 3:
            raise np.linalg.LinAlgError
        return solver(xp, h)

    monkeypatch.setattr(moving_rows, "definite_solver", third_fails)
    batch = batch_of(np, rows, None, items)
    assert len(list(on_moving_rows(batch))) == 2 and [item.number for item in batch.items] == [2]

    def fails(*args):
        raise np.linalg.LinAlgError

    monkeypatch.setattr(moving_rows, "definite_solver", solver)
    monkeypatch.setattr(moving_rows._Path, "_determined_by", fails)
    assert len(list(on_moving_rows(batch_of(np, rows, None, items)))) == 3  # by more steps alone
    monkeypatch.setattr(soft_margin, "definite_solver", fails)
    batch = batch_of(np, rows, None, items)
    assert not list(on_moving_rows(batch)) and len(batch.items) == 3


def test_radii_of_a_constant_column_beside_random_ones_are_closed_without_linear_programs():
    rows = MATRICES["gaussian"]
    report = verify(rows, [[1], [3, 400], [2, 5, 9, 77]], radius=True)
    assert np.all(report.radius_hi - report.radius_lo <= 1e-6 * report.radius_hi) and report.check()
    assert [stage.name for stage in report.stages if stage.taken][-1] == "radius"


def degenerate(kind, n, d, rng):
    W = rng.standard_normal((n, d))
    if kind == "duplicate and opposite rows":
        W[rng.integers(0, n, n // 2)] = W[0]
        W[rng.integers(0, n, 3)] = -2 * W[1]
    elif kind == "zero rows":
        W[rng.integers(0, n, 3)] = 0
    elif kind == "low rank":
        W = rng.standard_normal((n, 12)) @ rng.standard_normal((12, d))
    elif kind == "tiny":
        W *= 1e-30
    elif kind == "huge":
        W *= 1e30
    elif kind == "norms of all sizes":
        W *= 10.0 ** rng.integers(-12, 12, (n, 1))
    elif kind == "thin":
        W = rng.integers(-1, 2, (n, 3)) @ rng.integers(-1, 2, (3, d)) + rng.integers(-1, 2, (n, d)) * 2.0**-30
    return W


KINDS = ("duplicate and opposite rows", "zero rows", "low rank", "tiny", "huge", "norms of all sizes", "thin")


@pytest.mark.parametrize("n", (30, 150))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_proved_on_moving_rows_agrees_with_what_is_proved_without(kind, n, monkeypatch):
    """Two methods, one truth: the proved intervals intersect, whatever the rows, the rule, the domain and the bias."""
    rng, taken, move = np.random.default_rng(n), [], largest_balls.on_moving_rows
    d = largest_balls.FEW + 3
    W = degenerate(kind, n, d, rng)
    size = float(np.median(np.abs(W)))
    sets = [np.sort(rng.choice(n, r, replace=False)) for r in (0, 1, 2, 5, 9)]
    ones = [[3], [n - 1]]
    asked = (
        (sets, {}),
        (sets, {"bias": size * rng.standard_normal(n)}),
        (sets, {"domain": "nonnegative"}),
        (sets, {"threshold": "free"}),
        (ones, {"rule": "argmax"}),
        (sets[1:], {"rule": "topk", "domain": "nonnegative"}),
    )
    monkeypatch.setattr(largest_balls, "on_moving_rows", lambda batch: taken.append(batch.items) or move(batch))
    for given, options in asked:
        reports = []
        for peaked in (True, False):
            monkeypatch.setattr(largest_balls, "_is_peaked", lambda item, peaked=peaked: peaked)
            reports.append(verify(W, given, radius=True, **options))
        mine, other = reports
        assert mine.check() and list(mine.verdicts) == list(other.verdicts)
        assert np.all(mine.radius_lo <= other.radius_hi) and np.all(other.radius_lo <= mine.radius_hi)
        assert np.all(np.isfinite(mine.radius_hi) | ~np.isfinite(other.radius_hi))
    assert taken


@pytest.mark.parametrize("asked", [asked for asked in QUESTIONS if asked.ball == "box"], ids=str)
def test_small_fuzzed_questions_on_moving_rows(asked, monkeypatch):
    """The campaign of fuzz_verify.py against exact arithmetic, with every radius on this way."""
    report = Case.report
    monkeypatch.setattr(largest_balls, "FEW", 1)
    monkeypatch.setattr(largest_balls, "_is_peaked", lambda item: True)
    monkeypatch.setattr(Case, "report", lambda case, radius: report(case, True))
    counts = campaign(asked, cases=24, seed=2)
    assert counts["contradictions"] == counts["forgeries accepted"] == counts["open"] == 0
