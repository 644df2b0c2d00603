"""The public face of the verifier: accepted forms, order, executors, files, pictures, errors, forged proofs."""

import dataclasses
import json
import math
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

import sigkernels as sk
from sigkernels.verify import Certificate, Report, Verdict, verify
from sigkernels.verify.check import prove
from sigkernels.verify.question import Question

N, D = 30, 4
W = np.random.default_rng(0).standard_normal((N, D))
SETS = [np.sort(np.random.default_rng(i).choice(N, 2 + i % 3, replace=False)).tolist() for i in range(24)]
SETS += [np.flatnonzero(W @ x > 0).tolist() for x in np.random.default_rng(9).standard_normal((12, D))]


@pytest.fixture(scope="module")
def report():
    return verify(W, SETS)


def test_verdicts_radii_and_stages(report):
    counts = report.counts()
    assert counts["ARGMAXABLE"] >= 12 and counts["UNARGMAXABLE"] > 0
    assert len(report) == len(SETS) == len(report.radius_lo) == len(report.radius_hi)
    assert np.all(report.radius_lo <= report.radius_hi)
    assert sum(s.decided for s in report.stages) == len({tuple(s) for s in SETS})
    for i, verdict in enumerate(report.verdicts):
        assert isinstance(verdict, Verdict) and verdict == str(verdict)
        if verdict == "ARGMAXABLE":
            x = report.witness(i)
            assert np.flatnonzero(W @ x > 0).tolist() == SETS[i]
            assert np.abs(x).max() <= 1e4
            y = np.where(np.isin(np.arange(N), SETS[i]), 1, -1)
            assert (y * (W @ x) / np.linalg.norm(W, axis=1)).min() == pytest.approx(report.radius_lo[i], rel=1e-6)
        else:
            c = report.certificate(i)
            y = np.where(np.isin(c.support, SETS[i]), 1, -1)
            assert report.witness(i) is None
            assert np.all(c.multipliers > 0)
            assert np.abs((c.multipliers * y) @ W[c.support]).max() < 1e-12 * c.multipliers.sum()


def same(a, b):
    assert a.verdicts.tolist() == b.verdicts.tolist()
    assert b.check()


def test_every_form_of_input_gives_the_same_answers(report):
    dense = sk.LabelSets.from_lists(SETS, N).to_dense()
    same(report, verify(torch.from_numpy(W), sk.LabelSets.from_lists(SETS, N)))
    same(report, verify(W, dense))
    same(report, verify(W, dense.numpy()))
    same(report, verify(W, dense.to_sparse_csr()))
    same(report, verify(W, sk.LabelSets.from_lists(SETS, N).to_scipy()))
    linear = torch.nn.Linear(D, N, bias=False, dtype=torch.float64)
    head = sk.LinearHead(D, N, bias=False, dtype=torch.float64)
    for module in (linear, head):
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(W))
        same(report, verify(module, SETS))


def test_the_bias_of_a_module_is_used():
    linear = torch.nn.Linear(D, N, dtype=torch.float64)
    a = verify(linear, SETS)
    b = verify(linear.weight, SETS, bias=linear.bias)
    assert a.question.bias is not None
    same(a, b)
    with pytest.raises(ValueError, match="bias of its own"):
        verify(linear, SETS, bias=np.zeros(N))


def test_float32_weights_are_the_exact_numbers_they_store():
    r = verify(W.astype(np.float32), SETS[:4])
    assert any("float32" in note for note in r.notes)
    same(r, verify(W.astype(np.float32).astype(np.float64), SETS[:4]))
    half = torch.from_numpy(W).to(torch.bfloat16)
    same(verify(half, SETS[:4]), verify(half.double(), SETS[:4]))


def test_a_projection_that_cannot_reach_every_input_is_noted():
    assert any("from 4 to 16 features" in note for note in verify(sk.LinearHead(4, N, bottleneck=16), SETS[:1]).notes)
    narrow = sk.LinearHead(4, N, bottleneck=16)
    narrow.proj = torch.nn.Sequential(narrow.proj)  # a module without widths, such as an adapter
    assert any("from 4 to 16 features" in note for note in verify(narrow, SETS[:1]).notes)
    for head in (sk.LinearHead(16, N, bottleneck=16), sk.LinearHead(4, N)):
        assert not any("projection" in note for note in verify(head, SETS[:1]).notes)


def test_order_and_repeated_sets(report):
    order = np.random.default_rng(0).permutation(3 * len(SETS)) % len(SETS)
    shuffled = verify(W, [SETS[i] for i in order])
    assert shuffled.verdicts.tolist() == report.verdicts[order].tolist()
    assert shuffled.stages[0].taken == len({tuple(s) for s in SETS})  # each set is solved once
    assert shuffled.check()
    for row, i in enumerate(order[:10]):
        if shuffled.verdicts[row] == "ARGMAXABLE":
            assert np.flatnonzero(W @ shuffled.witness(row) > 0).tolist() == SETS[i]


def test_the_same_answers_on_every_run(report):
    again = verify(W, SETS)
    assert np.array_equal(again.radius_lo, report.radius_lo) and np.array_equal(again.radius_hi, report.radius_hi)


@pytest.mark.parametrize("pool", (ThreadPoolExecutor, ProcessPoolExecutor))
def test_executors_run_the_programs(pool):
    degenerate = np.repeat(np.random.default_rng(1).integers(-2, 3, (6, 3)).astype(float), 2, axis=0)
    sets = [[0, 1], [0, 3], [2, 3, 4, 5], [1], list(range(12))]
    serial = verify(degenerate, sets, radius=True)
    kwargs = {}
    if pool is ProcessPoolExecutor:
        import multiprocessing

        kwargs["mp_context"] = multiprocessing.get_context("spawn")
    with pool(2, **kwargs) as executor:
        parallel = verify(degenerate, sets, radius=True, executor=executor)
    same(serial, parallel)
    assert np.allclose(serial.radius_hi, parallel.radius_hi)


def test_radius_closes_the_interval():
    r = verify(W, SETS, radius=True)
    yes = np.array([v == "ARGMAXABLE" for v in r.verdicts])
    assert np.all(r.radius_hi[yes] - r.radius_lo[yes] <= 1e-6 * r.radius_hi[yes])
    assert r.stages[-1].name == "radius"
    assert r.check()


def test_the_chebyshev_fixture():
    rows = np.array([[-0.26, 0.97], [0.42, -0.91], [0.91, 0.42], [-0.82, -0.57]])
    r = verify(-rows, [[0, 1, 2, 3]], bias=np.array([5, 1, 8, -1.5]), radius=True)
    assert r.radius_lo[0] == pytest.approx(2.66629325, abs=1e-7) == pytest.approx(r.radius_hi[0], abs=1e-7)
    assert r.witness(0) == pytest.approx([2.87626447, 3.16518324], abs=1e-6)


def test_radius_of_an_empty_affine_region_is_negative():
    r = verify(np.array([[1.0], [-1.0]]), [[0, 1]], bias=np.array([-1.0, -1.0]), radius=True)  # x > 1 and x < -1
    assert r.verdicts[0] == "UNARGMAXABLE"
    assert r.radius_lo[0] == pytest.approx(-1, rel=1e-6) == pytest.approx(r.radius_hi[0], rel=1e-6)
    assert r.check()


def test_covers_counts():
    import itertools

    from sigkernels.signs import count_argmaxable

    for n, d in ((8, 2), (8, 3), (10, 5)):
        matrix = np.random.default_rng(n).standard_normal((n, d))
        every = np.array(list(itertools.product((0, 1), repeat=n)))
        assert verify(matrix, every).counts()["ARGMAXABLE"] == count_argmaxable(n, d)
    shifted = verify(matrix[:8, :3], every[::4, :8], bias=np.random.default_rng(0).standard_normal(8))
    assert shifted.counts()["ARGMAXABLE"] == count_argmaxable(8, 3, bias=True)


def test_totally_positive_rows_reach_exactly_the_alternating_vectors():
    import itertools

    from sigkernels.signs import alternations

    n, d = 9, 4
    every = np.array(list(itertools.product((0, 1), repeat=n)))
    r = verify(np.vander(np.arange(1.0, n + 1), d, increasing=True), every)
    assert [v in ("ARGMAXABLE", "THIN") for v in r.verdicts] == (alternations(every) <= d - 1).tolist()


# Forged proofs


def test_forged_certificates_are_rejected(report):
    question = Question(W, None, -1, 1e-8, 1e4)
    yes = next(i for i, v in enumerate(report.verdicts) if v == "ARGMAXABLE")
    no = next(i for i, v in enumerate(report.verdicts) if v == "UNARGMAXABLE")
    good, bad = report.certificate(yes), report.certificate(no)
    active, empty = np.array(SETS[yes]), np.array(SETS[no])
    assert prove(question, active, good).argmaxable is True
    assert prove(question, empty, bad).argmaxable is False
    forged = [
        (empty, good),  # a witness of another set
        (empty, dataclasses.replace(good, witness=np.zeros(D))),
        (empty, Certificate("witness")),
        (empty, Certificate("witness", witness=np.full(D, np.nan))),
        (empty, Certificate("witness", witness=np.ones(D + 1))),
        (empty, Certificate("witness", witness=np.array([1.0] * D, dtype=object))),
        (empty, Certificate("made up")),
        (active, bad),  # multipliers of another set
        (active, dataclasses.replace(bad, multipliers=bad.multipliers * 0)),
        (active, dataclasses.replace(bad, multipliers=-bad.multipliers)),
        (active, dataclasses.replace(bad, support=bad.support[:-1])),
        (active, dataclasses.replace(bad, support=bad.support + N)),
        (active, dataclasses.replace(bad, support=np.zeros_like(bad.support))),
        (active, Certificate("gordan", support=active[:1], multipliers=np.array([Fraction(1)], dtype=object))),
        (active, Certificate("gordan", support=active[:1], multipliers=np.array([1.0]))),
        (active, Certificate("gordan", support=np.zeros(0, dtype=int), multipliers=np.zeros(0))),
        (active, Certificate("gordan")),
        (empty, dataclasses.replace(bad, multipliers=bad.multipliers * (1 + 1e-6 * np.arange(len(bad.multipliers))))),
    ]
    for labels, certificate in forged:
        proof = prove(question, labels, certificate)
        assert proof.argmaxable is None, certificate
        assert proof.reason


@pytest.mark.parametrize("field", ("verdicts", "radius_lo", "radius_hi", "witness", "multipliers", "sets"))
def test_a_tampered_report_does_not_check(field):
    r = verify(W, SETS)
    yes = next(i for i, v in enumerate(r.verdicts) if v == "ARGMAXABLE")
    no = next(i for i, v in enumerate(r.verdicts) if v == "UNARGMAXABLE")
    assert r.check()
    if field == "verdicts":
        r.verdicts[no], r.verdicts[yes] = Verdict.ARGMAXABLE, Verdict.UNARGMAXABLE
    elif field == "radius_lo":
        r.radius_lo[yes] *= 1.001
    elif field == "radius_hi":
        r.radius_hi[yes] = r.radius_lo[yes]
    elif field == "witness":
        r.certificate(yes).witness[:] *= -1
    elif field == "multipliers":
        r.certificate(no).multipliers[0] *= 2
    else:
        other = next(v for v in range(N) if v not in SETS[no])
        r.sets = sk.LabelSets.from_lists([*SETS[:no], [other, *SETS[no][1:]], *SETS[no + 1 :]], N)
    result = r.check()
    assert not result and not result.all() and result.failures
    assert len(result) == len(r) and list(result) == result.ok.tolist()
    assert "rejected" in repr(result)


def test_check_against_another_matrix(report):
    assert report.check(W)
    assert not report.check(-W)
    with pytest.raises(ValueError, match="the report is about"):
        report.check(W[:, :2])


# Files, tables, pictures


@pytest.mark.parametrize("matrix", (True, False))
def test_save_and_load(report, tmp_path, matrix):
    report.save(tmp_path / "r.npz", matrix=matrix)
    if not matrix:
        with pytest.raises(ValueError, match="without its matrix"):
            Report.load(tmp_path / "r.npz")
        with pytest.raises(ValueError, match="the report is about"):
            Report.load(tmp_path / "r.npz", W[:, :2])
    loaded = Report.load(tmp_path / "r.npz", None if matrix else W)
    assert loaded.verdicts.tolist() == report.verdicts.tolist()
    assert np.array_equal(loaded.radius_lo, report.radius_lo)
    assert loaded.stages == report.stages and loaded.notes == report.notes
    assert loaded.summary() == report.summary()
    assert loaded.check()


def test_save_and_load_exact_proofs(tmp_path):
    slope = np.nextafter(1.0, 2.0)
    matrix = np.array([[1.0, 0.0], [-1.0, 1.0], [slope, -1.0], [3.0, -3.0]], dtype=np.float64)
    r = verify(matrix, [[0, 1, 2], [0, 1, 2, 3], [0], []])
    r.save(tmp_path / "exact.npz")
    loaded = Report.load(tmp_path / "exact.npz")
    assert loaded.verdicts.tolist() == r.verdicts.tolist()
    assert loaded.check()


def test_save_and_load_dft(tmp_path):
    torch.manual_seed(0)
    r = verify(sk.DFTHead(64, 50, 3, 2), [[1, 2], [3, 9, 11], list(range(0, 50, 2))])
    r.save(tmp_path / "dft.npz")
    loaded = Report.load(tmp_path / "dft.npz")
    assert loaded.verdicts.tolist() == r.verdicts.tolist()
    assert loaded.check()


def test_tables(report):
    table = report.to_numpy()
    assert table["verdict"].tolist() == [str(v) for v in report.verdicts]
    assert table["active"].tolist() == [len(s) for s in SETS]
    assert set(table["proof"]) <= {"witness", "gordan"}
    frame = pytest.importorskip("pandas") and report.to_dataframe()
    assert list(frame.columns) == list(table) and len(frame) == len(report)
    assert "UNARGMAXABLE" in report.summary() and "newton" in report.summary()
    assert "label sets" in repr(report)


def test_plot(report):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = report.plot()
    left, right = figure.axes
    assert sum(p.get_height() for p in left.patches) == (report.radius_lo > 0).sum()
    assert max(p.get_y() + p.get_height() for p in right.patches) == pytest.approx(1)
    with pytest.raises(ValueError, match="two matplotlib axes"):
        report.plot(left)


def test_progress():
    seen = []
    verify(W, SETS, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len({tuple(s) for s in SETS})
    assert [a for a, _ in seen] == sorted(a for a, _ in seen)
    verify(W, SETS[:2], progress=True)


def test_progress_of_a_check(report):
    seen = []
    report.check(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(report), len(report))
    assert [a for a, _ in seen] == sorted({a for a, _ in seen})
    with pytest.raises(TypeError, match="progress must be"):
        report.check(progress="yes")


# Degenerate and bad input


def test_degenerate_shapes():
    assert verify(np.ones((1, 1)), [[0], []]).verdicts.tolist() == ["ARGMAXABLE", "ARGMAXABLE"]
    assert verify(np.zeros((2, 3)), [[0]]).verdicts[0] == "UNARGMAXABLE"
    assert verify(np.zeros((2, 3)), [[0]], bias=[1.0, -1.0]).verdicts[0] == "ARGMAXABLE"
    assert verify(np.zeros((2, 3)), [[0]], bias=[1.0, 0.0]).verdicts[0] == "UNARGMAXABLE"
    assert verify(np.eye(3, 7), [[0, 2]]).verdicts[0] == "ARGMAXABLE"  # n < d
    nothing = verify(W, [])
    assert len(nothing) == 0 and nothing.check() and nothing.summary() and nothing.to_numpy()
    assert json.dumps(nothing.counts())


def test_extreme_numbers_never_give_a_wrong_answer():
    for scale in (1e-300, 1e-160, 1e160, 1e300):
        r = verify(np.array([[1.0, 0.5], [-1.0, 1.0]]) * scale, [[0], [0, 1]])
        assert all(v in ("ARGMAXABLE", "THIN") for v in r.verdicts), (scale, r.verdicts)
        assert r.check()
        no = verify(np.array([[1.0], [-1.0]]) * scale, [[0, 1]])
        assert no.verdicts[0] == "UNARGMAXABLE" and no.check()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"head_or_matrix": "W"}, TypeError, "head_or_matrix must be a head"),
        ({"head_or_matrix": np.ones(3)}, ValueError, "got shape \\(3,\\)"),
        ({"head_or_matrix": np.ones((0, 3))}, ValueError, "got shape"),
        ({"head_or_matrix": np.ones((3, 0))}, ValueError, "got shape"),
        ({"head_or_matrix": np.full((N, D), np.nan)}, ValueError, "nan at \\[0, 0\\]"),
        ({"head_or_matrix": np.where(np.arange(N)[:, None] == 3, np.inf, W)}, ValueError, "inf at \\[3, 0\\]"),
        ({"head_or_matrix": [[1.0, 2.0], [3.0]]}, ValueError, "head_or_matrix must have rows of one length"),
        ({"bias": [1.0, [2.0]]}, ValueError, "bias must have rows of one length"),
        ({"head_or_matrix": W.astype(complex)}, TypeError, "real numbers"),
        ({"head_or_matrix": np.full((N, D), 2**60)}, ValueError, "beyond 2\\^53"),
        ({"label_sets": [[N]]}, ValueError, f"label {N} in row 0 is out of range"),
        ({"label_sets": [[-1]]}, ValueError, "out of range"),
        ({"label_sets": [3, 4]}, TypeError, "row 0"),
        ({"label_sets": [[0.5]]}, TypeError, "not a whole number"),
        ({"label_sets": np.ones(N)}, ValueError, "wrap one set"),
        ({"label_sets": np.ones((2, N + 1))}, ValueError, f"label_sets has num_labels = {N + 1}, but {N}"),
        ({"label_sets": np.full((2, N), 0.5)}, ValueError, "0 and 1"),
        ({"label_sets": 7}, TypeError, "label_sets must be LabelSets"),
        ({"bias": np.zeros(N + 1)}, ValueError, "bias must have shape"),
        ({"bias": np.full(N, np.inf)}, ValueError, "bias holds inf"),
        ({"tol": -1}, ValueError, "tol must be at least 0"),
        ({"tol": math.nan}, ValueError, "tol must be finite"),
        ({"tol": "small"}, TypeError, "tol must be a number"),
        ({"box": 0}, ValueError, "box must be positive"),
        ({"box": math.inf}, ValueError, "box must be finite"),
        ({"device": "tpu"}, ValueError, "device='tpu'"),
        ({"executor": 4}, TypeError, "executor must be a concurrent.futures.Executor"),
        ({"radius": "yes"}, TypeError, "radius must be True or False, got 'yes'"),
        ({"threshold": sk.Thresholds(torch.ones(3) / 2, torch.ones(3))}, TypeError, "threshold=tuned.values"),
        ({"progress": "yes"}, TypeError, "progress must be"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        verify(**{"head_or_matrix": W, "label_sets": SETS, **arguments})


def test_a_sharded_weight_says_how_to_gather_it():
    class DTensor(torch.Tensor):
        def full_tensor(self): ...
        def to_local(self): ...

    weight = torch.ones(5, 2).as_subclass(DTensor)
    linear = torch.nn.Linear(2, 5)
    linear.weight = torch.nn.Parameter(weight)
    for classifier in (weight, linear):
        with pytest.raises(TypeError, match=r"is a DTensor, sharded over processes: gather it .* full_tensor\(\)"):
            verify(classifier, [[0]])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(5, 2, device="meta"), "meta device"),
        (torch.ones(5, 2).to_sparse(), "must be dense"),
        (torch.ones(5, 2).to(torch.float8_e5m2), "dequantize it first"),
    ],
)
def test_tensors_without_numbers_of_their_own_are_refused(weight, message):
    with pytest.raises(TypeError, match=message):
        verify(weight, [[0]])


def test_cuda_without_cupy_or_gpu_says_what_to_do():
    try:
        import cupy

        if cupy.is_available():
            pytest.skip("there is a GPU")
    except ImportError:
        pass
    with pytest.raises(RuntimeError, match=r'device="cpu"'):
        verify(W, SETS, device="cuda")


def test_entries_that_underflow_when_rows_are_scaled_are_not_lost():
    # The tiny second entries decide: x₁ cancels, x₂ > 0 remains. Scaling the rows must not drop them.
    W = np.array([[1e300, 1e-30], [-1e300, 1e-30]])
    report = verify(W, [[0, 1]])
    assert report.verdicts[0] in ("THIN", "ARGMAXABLE", "UNDECIDED")
    assert (
        prove(
            report.question, np.array([0, 1]), Certificate("gordan", support=np.arange(2), multipliers=np.ones(2))
        ).argmaxable
        is None
    )


def test_one_blas_thread_while_it_works_and_as_many_as_before_afterwards():
    def threads():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    before, during = threads(), []
    W = np.random.default_rng(0).standard_normal((50, 4))
    report = verify(W, [[1], [2, 3]], progress=lambda done, total: during.append(threads()))
    assert report.check()
    assert during and all(set(counts) == {1} for counts in during) and threads() == before


def test_a_radius_without_a_bound_is_closed():
    report = verify(np.zeros((2, 3)), [[0], []], bias=[1.0, -1.0], radius=True)  # no row is a boundary anywhere
    assert report.radius_lo[0] == report.radius_hi[0] == np.inf and report.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "radius closed to 1e-06 of its size for 1 of 1 sets\n" in report.summary()


def test_a_witness_is_the_callers_own():
    report = verify(np.eye(3), [[0]])
    report.witness(0)[:] = 0.0
    assert report.check() and np.flatnonzero(report.witness(0) > 0).tolist() == [0]
