"""The screens: one source for numpy, cupy and any strict array namespace; and the solvers under them."""

from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import linprog

from sigkernels.codes import code_matrix
from sigkernels.verify import pipeline, verify
from sigkernels.verify.input_ball import Box
from sigkernels.verify.question import Question
from sigkernels.verify.solvers import largest_balls
from sigkernels.verify.solvers.arrays import smallest, to_numpy
from sigkernels.verify.solvers.cone import Cone
from sigkernels.verify.solvers.exact import gordan_alternative, integer_row
from sigkernels.verify.solvers.largest_balls import Item, balls
from sigkernels.verify.solvers.lp import chebyshev
from sigkernels.verify.solvers.newton import (
    _first_choice,
    hinge_newton,
    hinge_newton_one,
    motzkin,
    newton,
    newton_on_all_rows,
    weighted_ridge,
)

strict = pytest.importorskip("array_api_strict")
N, D = 60, 5
rng = np.random.default_rng(0)
W = rng.standard_normal((N, D))
LISTS = [np.sort(rng.choice(N, 3, replace=False)) for _ in range(20)]
LISTS += [np.flatnonzero(W @ x > 0) for x in rng.standard_normal((20, D))]


def question(bias=None):
    return Question(W, bias, -1, 1e-8, 1e4)


def sets():
    return LISTS


def answers(screen, xp, bias=None):
    """+1 for a witness that has the signs of its set, -1 for multipliers that cancel, 0 for nothing."""
    p, s = question(bias), sets()
    out = np.zeros(len(s), dtype=int)
    with np.errstate(all="ignore"):
        for found in screen(Cone(p, xp), s, np.arange(len(s))):
            for i, x in zip(found.witness_of, found.witness, strict=True):
                logits = W @ x if bias is None else W @ x + bias
                assert np.array_equal(np.flatnonzero(logits > 0), s[i])
                out[i] = 1
            for i, (support, multipliers) in zip(found.multipliers_of, found.multipliers, strict=True):
                y = np.where(np.isin(support, s[i]), 1.0, -1.0)
                total = (y * multipliers) @ W[support]
                if multipliers.size and np.abs(total).max() < 1e-12 * multipliers.sum():
                    out[i] = -1
    return out


@pytest.mark.parametrize("screen", (motzkin, newton, newton_on_all_rows))
@pytest.mark.parametrize("biased", (False, True))
def test_a_strict_namespace_gives_the_answers_of_numpy(screen, biased):
    bias = np.linspace(-0.5, 0.5, N) if biased else None
    assert np.array_equal(answers(screen, np, bias), answers(screen, strict, bias))


def test_newton_decides_every_set_of_a_generic_matrix():
    for screen in (newton, newton_on_all_rows):
        decided = answers(screen, np)
        assert np.all(decided[20:] == 1)
        assert np.all(decided != 0)


def test_motzkin_finds_wide_regions_only():
    decided = answers(motzkin, np)
    assert decided.max() == 1 and decided.min() == 0


def test_working_rows_grow_until_the_answer_holds_for_all_rows():
    wide = np.random.default_rng(1).standard_normal((3000, 6))
    p = Question(wide, None, -1, 1e-8, 1e4)
    lists = [np.flatnonzero(wide @ x > 0) for x in np.random.default_rng(2).standard_normal((6, 6))]
    s = lists
    decided = {int(i) for found in newton(Cone(p), s, np.arange(6)) for i in found.witness_of}
    assert decided == set(range(6))


def test_hinge_newton_on_both_kinds_of_region():
    open_, closed = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [-1.0, 1.0], [-1.0, -1.0]])
    hinge = hinge_newton(np, np.stack([open_, closed]), np.zeros((2, 2)))
    assert hinge.feasible.tolist() == [True, False]
    assert np.all(open_ @ hinge.x[0] > 0)
    assert np.abs(closed.T @ np.maximum(hinge.s[1], 0)).max() < 1e-14


@pytest.mark.parametrize("xp", (np, strict))
def test_one_set_at_a_time_ends_where_many_at_once_do(xp):
    rows = np.random.default_rng(4).standard_normal((6, 90, 12))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    rows[3:] *= np.sign(rows[3:, :, :1])  # half of the sets: a half-space, so feasible
    x = np.random.default_rng(5).standard_normal((6, 12))
    together = hinge_newton(np, rows, x)
    assert together.feasible.tolist() == [False] * 3 + [True] * 3
    for i in range(6):
        y = np.where(np.arange(90) % 2, 1.0, -1.0)
        arrays = (xp.asarray(v) for v in (y[:, None] * rows[i], y, x[i]))
        one = hinge_newton_one(xp, *arrays)
        assert bool(one.feasible[0]) == bool(together.feasible[i])
        s = to_numpy(one.s)[0]
        assert np.allclose(s, 1.0 - rows[i] @ to_numpy(one.x)[0], atol=1e-12)
        if i < 3:
            assert np.allclose(np.maximum(s, 0.0), np.maximum(together.s[i], 0.0), atol=1e-9)
            assert np.abs(rows[i].T @ np.maximum(s, 0.0)).max() < 1e-13
        else:
            assert s.max() < 1.0


@pytest.mark.parametrize("xp", (np, strict))
def test_first_working_rows_lie_on_both_sides_of_a_start_that_fails_everywhere(xp):
    p = Question(np.random.default_rng(6).standard_normal((2000, 20)), None, -1, 1e-8, 1e4)
    cone = Cone(p, xp)
    actives = [np.array([3, 1500]), np.array([7])]
    y, x = cone.signs(actives), weighted_ridge(cone, actives)
    margins = y * xp.matmul(x, cone.rows.T)
    work = to_numpy(smallest(xp, _first_choice(cone, y, margins, 60), 60))
    margins = to_numpy(margins)
    assert np.all((margins < 0).sum(axis=1) > 60)  # the 60 worst are all violated: -x satisfies them
    for row, active in enumerate(actives):
        assert set(active) <= set(work[row])
        assert (margins[row, work[row]] > 0).sum() >= 8
        assert work[row][np.argmin(margins[row, work[row]])] == np.argmin(margins[row])
    s = actives
    with np.errstate(all="ignore"):
        first = next(iter(newton(cone, s, np.arange(2))))
    assert sorted(first.multipliers_of) == [0, 1]  # so the first round decides


def test_smallest_agrees_with_sorting():
    scores = np.random.default_rng(0).standard_normal((4, 50))
    expected = np.sort(np.argsort(scores, axis=1)[:, :7], axis=1)
    assert np.array_equal(np.sort(smallest(np, scores, 7), axis=1), expected)
    assert np.array_equal(np.sort(to_numpy(smallest(strict, strict.asarray(scores), 7)), axis=1), expected)
    assert smallest(np, scores, 50).shape == (4, 50)


def test_chebyshev_by_cutting_planes_equals_the_full_program():
    from scipy.optimize import linprog

    rows = np.random.default_rng(3).standard_normal((20_000, 4))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    active = np.flatnonzero(rows @ np.array([1.0, -2.0, 0.5, 3.0]) > 0)
    x, support, multipliers = chebyshev(rows, None, active, 1e4)
    y = np.full(20_000, -1.0)
    y[active] = 1.0
    full = linprog(
        [0, 0, 0, 0, -1],
        np.column_stack([-y[:, None] * rows, np.ones(20_000)]),
        np.zeros(20_000),
        bounds=[(-1e4, 1e4)] * 4 + [(None, None)],
    )
    assert (y * (rows @ x)).min() == pytest.approx(-full.fun, rel=1e-6)
    bound = 1e4 * np.abs((y[support] * multipliers) @ rows[support]).sum() / multipliers.sum()
    assert bound == pytest.approx(-full.fun, rel=1e-6)


def test_integer_rows_are_exact():
    for row in (np.array([0.1, -3.0, 2.0**-60]), np.array([0.0, 0.0]), np.array([5e-324, 1e308])):
        ints, exponent = integer_row(row)
        assert [Fraction(float(v)) for v in row] == [v * Fraction(2) ** exponent for v in ints]


@pytest.mark.parametrize("n", (12, 5000))
def test_exact_alternatives(n):
    rows = np.random.default_rng(n).integers(-9, 10, (n, 3)).astype(float)
    rows[~rows.any(axis=1)] = 1.0
    feasible = rows * np.where(rows @ np.array([1.0, 1e-3, 1e-6]) > 0, 1.0, -1.0)[:, None]
    point = gordan_alternative(feasible).point
    assert all(sum(int(a) * p for a, p in zip(row, point, strict=True)) > 0 for row in feasible)
    answer = gordan_alternative(np.concatenate([feasible, -feasible[:1]]))
    assert answer.point is None
    signed = np.concatenate([feasible, -feasible[:1]])
    for j in range(3):
        assert sum(m * int(signed[i, j]) for m, i in zip(answer.multipliers, answer.support, strict=True)) == 0


def check_largest_balls(rows, offset, lists, whole=False):
    """Both bounds of every set are the optimum of its full program, in numpy and by the standard's names alone."""
    n, d = rows.shape
    items = [Item(i, active, None) for i, active in enumerate(lists)]
    answers = {xp: {b.number: b for b in balls(xp, rows, offset, Box(10.0), items, whole)} for xp in (np, strict)}
    assert len(answers[np]) == len(answers[strict]) == len(items)
    for i, active, _ in items:
        y = np.where(np.isin(np.arange(n), active), 1.0, -1.0)
        shift = np.zeros(n) if offset is None else y * offset
        a = np.column_stack([-y[:, None] * rows, np.ones(n)])
        truth = linprog([0.0] * d + [-1.0], a, shift, bounds=[(-10, 10)] * d + [(None, None)]).x[-1]
        for answer in answers.values():
            x, support, multipliers = answer[i].x, answer[i].support, answer[i].multipliers
            assert np.abs(x).max() <= 10.0
            assert np.min(y * (rows @ x) + shift) == pytest.approx(truth, rel=1e-6)
            dual = 10.0 * np.abs((multipliers * y[support]) @ rows[support]).sum() + multipliers @ shift[support]
            assert dual / multipliers.sum() == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("whole", (False, True))
@pytest.mark.parametrize("biased", (False, True))
def test_the_largest_balls_of_many_sets_equal_the_full_programs(biased, whole):
    offset = np.linspace(-0.5, 0.5, N) if biased else None
    check_largest_balls(W / np.linalg.norm(W, axis=1, keepdims=True), offset, LISTS[20:], whole)


def test_balls_that_a_row_left_out_would_cut_are_solved_again_on_all_rows(monkeypatch):
    solved = []
    solve = largest_balls.interior
    monkeypatch.setattr(
        largest_balls, "interior", lambda *args, **kw: solved.append(args[1].shape[:2]) or solve(*args, **kw)
    )
    monkeypatch.setattr(largest_balls, "ROUGH_ON_ALL", 100.0)  # nothing is known when rows are left out
    check_largest_balls(W / np.linalg.norm(W, axis=1, keepdims=True), None, LISTS[20:], whole=True)
    assert [rows for _, rows in solved] == [N, 20, N] * 2  # in numpy, and in the strict namespace


@pytest.mark.parametrize("biased", (False, True))
def test_the_largest_balls_of_wide_layers_where_most_coordinates_end_at_the_edge_of_the_box(biased, monkeypatch):
    held = []
    few = largest_balls.in_few_coordinates
    monkeypatch.setattr(largest_balls, "in_few_coordinates", lambda *args: held.append(args[-1].shape[1]) or few(*args))
    rng = np.random.default_rng(5)
    n, d = 700, 90
    rows = rng.standard_normal((n, d)) - 0.5  # as trained layers are: without input, no label
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    offset = 0.1 * rng.standard_normal(n) if biased else None
    check_largest_balls(rows, offset, [rng.choice(n, active, replace=False) for active in (0, 1, 2, 4)])
    assert held and max(held) < d  # with fewer coordinates than there are


def test_witnesses_found_in_float32_are_proved_in_float64(monkeypatch):
    monkeypatch.setattr(pipeline, "SINGLE_FIRST", ("cpu",))
    single = verify(W, LISTS)
    monkeypatch.undo()
    double = verify(W, LISTS)
    assert np.array_equal(single.verdicts, double.verdicts)
    assert single.check()
    stage = next(s for s in single.stages if s.name == "newton float32")
    assert stage.decided == double.counts()["ARGMAXABLE"]  # every yes, and no "no": that takes float64
    assert not any(s.name == "newton float32" for s in double.stages)


@pytest.mark.parametrize("xp", (np, strict))
@pytest.mark.parametrize("screen", (motzkin, newton, newton_on_all_rows))
def test_a_float32_screen_stays_in_float32_and_hands_over_witnesses_alone(screen, xp):
    cone = Cone(question(), xp, single=True)
    assert cone.rows.dtype == xp.float32
    with np.errstate(all="ignore"):
        found = list(screen(cone, sets(), np.arange(len(LISTS))))
    assert sum(len(f.witness_of) for f in found) >= 15
    assert not any(f.multipliers_of for f in found)


def test_radii_of_wide_random_like_layers_are_closed_without_linear_programs():
    """The ball of a few rows is cut by half of all rows there; the interior-point method must not give up."""
    n, c = 11_732, 256
    matrix = np.column_stack([np.full(n, n**-0.5), code_matrix(n, c).numpy()])
    draw = np.random.default_rng(0)
    report = verify(matrix, [draw.choice(n, 4, replace=False).tolist() for _ in range(2)], radius=True)
    assert [stage.name for stage in report.stages][-1] == "radius"
    np.testing.assert_allclose(report.radius_lo, [408.902866, 440.524178], rtol=1e-7)
    np.testing.assert_allclose(report.radius_hi, report.radius_lo, rtol=1e-6)
