"""What sk.verify takes: every form of classifier, order, executors, degenerate and extreme numbers; what it refuses."""

import json
import math
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info
from verify_cases import SETS, D, N, W

import sigkernels as sk
from sigkernels.verify import Certificate, verify
from sigkernels.verify.check import prove


@pytest.fixture(scope="module")
def report():
    return verify(W, SETS)


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


def test_one_blas_thread_while_it_works_and_as_many_as_before_afterwards():
    def threads():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    before, during = threads(), []
    W = np.random.default_rng(0).standard_normal((50, 4))
    report = verify(W, [[1], [2, 3]], progress=lambda done, total: during.append(threads()))
    assert report.check()
    assert during and all(set(counts) == {1} for counts in during) and threads() == before
