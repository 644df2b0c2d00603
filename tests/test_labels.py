"""LabelSets: every form in and out, indexing, runs, and the inputs it refuses."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import LabelSets

N = 12
sets_of_labels = st.lists(st.sets(st.integers(0, N - 1)), max_size=8)


@given(sets_of_labels)
def test_round_trips(rows):
    sets = LabelSets.from_lists(rows, N)
    assert sets.to_lists() == [sorted(row) for row in rows]
    assert LabelSets.from_dense(sets.to_dense()) == sets
    assert LabelSets.from_dense(sets.to_dense(torch.bool)) == sets
    assert LabelSets.from_csr(sets.to_scipy()) == sets
    assert LabelSets.from_csr(sets.to_dense().to_sparse_csr()) == sets
    assert LabelSets(sets.indices, sets.offsets, N) == sets
    assert [row.tolist() for row in sets] == sets.to_lists()
    assert pickle.loads(pickle.dumps(sets)) == sets == copy.deepcopy(sets)
    assert sets.max_active == max((len(row) for row in rows), default=0)


@given(sets_of_labels)
def test_runs_are_counted_around_the_circle(rows):
    want = [sum(label in row and (label - 1) % N not in row for label in range(N)) for row in rows]
    assert LabelSets.from_lists(rows, N).runs().tolist() == want


@given(sets_of_labels, st.data())
def test_indexing_is_that_of_a_list(rows, data):
    sets, lists = LabelSets.from_lists(rows, N), [sorted(row) for row in rows]
    key = data.draw(st.slices(len(rows)))
    assert sets[key].to_lists() == lists[key]
    if rows:
        index = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1)))
        assert sets[torch.tensor(index, dtype=torch.int64)].to_lists() == [lists[i] for i in index]
        assert sets[index[0] if index else 0].tolist() == lists[index[0] if index else 0]
        mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        assert sets[torch.tensor(mask)].to_lists() == [row for row, keep in zip(lists, mask, strict=True) if keep]


def test_repeats_count_once_and_rows_are_sorted():
    assert LabelSets.from_lists([[5, 3, 5], (2, 2)], 9).to_lists() == [[3, 5], [2]]
    twice = scipy.sparse.csr_matrix((np.ones(2), np.array([4, 4]), np.array([0, 2])), (1, 9))
    assert LabelSets(torch.tensor([4, 4]), torch.tensor([0, 2]), 9).to_lists() == [[4]]
    assert LabelSets.from_csr(twice).to_lists() == [[4]]


def test_stored_zeros_are_dropped():
    matrix = scipy.sparse.csr_matrix((np.array([1.0, 0.0]), np.array([1, 2]), np.array([0, 1, 2])), (2, 5))
    assert LabelSets.from_csr(matrix).to_lists() == [[1], []]
    assert LabelSets.from_csr(matrix.tocoo()).to_lists() == [[1], []]


def test_the_input_is_left_alone():
    indices, offsets = torch.tensor([5, 3]), torch.tensor([0, 2])
    LabelSets(indices, offsets, 9)
    assert indices.tolist() == [5, 3]


def test_numpy_rows_and_integer_types():
    sets = LabelSets.from_lists([np.array([1, 2]), torch.tensor([0])], 3)
    assert sets.to_lists() == [[1, 2], [0]]
    small = LabelSets(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32), 3)
    assert small.indices.dtype == small.offsets.dtype == torch.int64


def test_lists_of_labels_are_not_taken_for_dense_targets():
    assert LabelSets.from_lists([[0, 1], [1, 0], [0], []], 2).to_lists() == [[0, 1], [0, 1], [0], []]
    assert LabelSets.from_lists([[1, 1, 0]], 9).to_lists() == [[0, 1]]
    assert LabelSets.from_lists(torch.tensor([[3, 17], [5, 5]]), 20).to_lists() == [[3, 17], [5]]


def test_later_changes_of_the_arguments_do_not_reach_the_sets():
    indices, offsets, dense = torch.tensor([1, 3]), torch.tensor([0, 2]), np.eye(2)
    sets, others = LabelSets(indices, offsets, 9), LabelSets.from_dense(dense)
    indices[0], offsets[1], dense[:] = 7, 1, 0
    assert sets.to_lists() == [[1, 3]] and others.to_lists() == [[0], [1]]


def test_numpy_indices():
    sets = LabelSets.from_lists([[1], [2], [3]], 5)
    assert sets[np.array([2, -3])] == sets[[2, 0]]
    assert sets[np.array([1, 0], dtype=np.uint8)] == sets[[1, 0]]
    assert sets[np.array([True, False, True])] == sets[[0, 2]]
    assert sets[np.array([], dtype=np.int64)].to_lists() == []
    assert sets[np.int64(1)].tolist() == sets[np.array(1)].tolist() == [2]


def test_saved_sets_load_and_are_checked(tmp_path):
    sets = LabelSets.from_lists([[1], [2, 3]], 5)
    torch.save({"labels": sets}, tmp_path / "sets.pt")
    assert torch.load(tmp_path / "sets.pt", weights_only=True)["labels"] == sets
    torch.save(LabelSets.from_sorted(sets.indices, torch.tensor([0, 1, 100]), 5), tmp_path / "broken.pt")
    with pytest.raises(ValueError, match="offsets must go from 0 to"):
        torch.load(tmp_path / "broken.pt", weights_only=True)


def test_repr_and_equality():
    sets = LabelSets.from_lists([[3, 17], [], [5], [1]], num_labels=20)
    assert repr(sets) == "LabelSets([{3, 17}, {}, {5}, …], 4 sets, num_labels=20, max_active=2)"
    assert sets != LabelSets.from_lists([[3, 17], [], [5], [1]], num_labels=21)
    assert sets != [[3, 17], [], [5], [1]]
    assert repr(LabelSets.from_lists([], 4)) == "LabelSets([], 0 sets, num_labels=4, max_active=0)"
    assert repr(LabelSets.from_lists([range(9)], 9)).startswith("LabelSets([{0, 1, 2, 3, 4, 5, …}]")


def test_moves():
    sets = LabelSets.from_lists([[3], [1]], 4)
    assert sets.to("meta").device.type == "meta"
    assert sets.to("cpu") == sets
    if torch.cuda.is_available():
        assert sets.pin_memory().indices.is_pinned()


def test_collate_in_a_data_loader_with_workers():
    samples = [(torch.full((2,), float(i)), [i, (i * 7) % 10]) for i in range(6)]
    loader = torch.utils.data.DataLoader(samples, 4, collate_fn=LabelSets.collate_fn(10), num_workers=1)
    batches = list(loader)
    assert [len(sets) for _, sets in batches] == [4, 2]
    assert batches[1][0].shape == (2, 2)
    assert batches[0][1].to_lists() == [[0], [1, 7], [2, 4], [1, 3]]
    plain = torch.utils.data.DataLoader([[1], [2]], 2, collate_fn=LabelSets.collate_fn(10))
    assert next(iter(plain)).to_lists() == [[1], [2]]


def test_collate_takes_dicts_and_lists():
    dicts = [{"x": torch.ones(2), "codes": [i, 3]} for i in range(2)]
    batch = LabelSets.collate_fn(5, key="codes")(dicts)
    assert batch["x"].shape == (2, 2) and batch["codes"].to_lists() == [[0, 3], [1, 3]]
    assert list(LabelSets.collate_fn(5)([{"labels": [1]}])) == ["labels"]
    x, sets = LabelSets.collate_fn(5)([[torch.ones(2), [1]], [torch.zeros(2), []]])
    assert x.shape == (2, 2) and sets.to_lists() == [[1], []]


def damaged(**arrays) -> scipy.sparse.csr_matrix:
    matrix = scipy.sparse.csr_matrix((np.ones(2), np.array([0, 1]), np.array([0, 1, 2])), (2, 3))
    for name, values in arrays.items():
        setattr(matrix, name, np.array(values))
    return matrix


@given(sets_of_labels)
def test_of_takes_every_form(rows):
    want = LabelSets.from_lists(rows, N)
    forms = [
        want,
        rows,
        tuple(frozenset(row) for row in rows),
        (np.array(sorted(row), dtype=np.int32) for row in rows),
        want.to_dense(),
        want.to_dense(torch.int64),
        want.to_dense(torch.bool).numpy(),
        want.to_scipy(),
        want.to_scipy().tocoo(),
        want.to_dense().to_sparse_csr(),
        want.to_dense().to_sparse(),
    ]
    for form in forms:
        assert LabelSets.of(form, N) == want, type(form)
    assert LabelSets.of(want) is want and LabelSets.of(want.to_scipy()) == want


def test_of_takes_pandas():
    pandas = pytest.importorskip("pandas")
    want = LabelSets.from_lists([[0, 2], [], [1]], 3)
    assert LabelSets.of(pandas.Series([[0, 2], [], [1]]), 3) == want
    assert LabelSets.of(pandas.DataFrame(want.to_dense(torch.int64).numpy()), 3) == want


@given(st.lists(sets_of_labels, min_size=1, max_size=4))
def test_cat_joins_what_slices_cut(parts):
    sets = [LabelSets.from_lists(rows, N) for rows in parts]
    joined = LabelSets.cat(sets)
    assert joined.to_lists() == [sorted(row) for rows in parts for row in rows]
    cut = len(joined) // 2
    assert LabelSets.cat([joined[:cut], joined[cut:]]) == joined


def test_huge_numbers_of_labels_do_not_overflow():
    n = 2**40
    sets = LabelSets(torch.tensor([n - 1, 0, 5, 5]), torch.tensor([0, 2, 4]), n)
    assert sets.to_lists() == [[0, n - 1], [5]] and sets.runs().tolist() == [1, 1]
    offsets = torch.zeros(2**23 + 1, dtype=torch.int64)
    many = LabelSets.from_sorted(torch.zeros(0, dtype=torch.int64), offsets, n)
    with pytest.raises(ValueError, match="no positions in int64"):
        many.keys()


def test_sets_of_inference_mode():
    with torch.inference_mode():
        sets = LabelSets(torch.tensor([5, 1]), torch.tensor([0, 2]), 12)
        assert sets.to_lists() == [[1, 5]]
        sets.indices[0] = 8
        with pytest.raises(ValueError, match="not in ascending order"):
            sets.to_lists()


def test_a_slice_is_saved_without_the_rest():
    many = LabelSets.from_lists([[i % 7, 7 + i % 5] for i in range(10_000)], 12)
    for part in (many[5:7], many[-1:], many[[3, 9]]):
        saved = io.BytesIO()
        torch.save(part, saved)
        assert len(saved.getvalue()) < 5_000 and len(pickle.dumps(part)) < 5_000
        saved.seek(0)
        assert torch.load(saved) == pickle.loads(pickle.dumps(part)) == part


@pytest.mark.parametrize("loss", (sk.BCE(), sk.LMLNLL(3), sk.SigmoidF1()))
def test_predictions_of_inference_mode_become_targets(loss):
    """Pseudo-labels: autograd saves no tensor that was made in inference mode."""
    torch.manual_seed(0)
    head, h = sk.LinearHead(4, 12), torch.randn(3, 4)
    with torch.inference_mode():
        sets = head.predict(h)
        parts = LabelSets.cat([sets[:1], LabelSets.of(sets.to_lists()[1:], 12)])
    for targets in (sets, parts):
        head.zero_grad()
        head(h, targets, loss).backward()
        assert targets == LabelSets.of((head(h) > 0).int())
        assert head.weight.grad.abs().sum() > 0
    head(h, [[1]] * 3, unknown=sets).backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", (torch.strided, torch.jagged))
def test_nested_tensors_are_rows_of_labels(layout):
    nested = torch.nested.nested_tensor([torch.tensor([5, 1]), torch.tensor([7])], layout=layout)
    sets = LabelSets.from_lists([[1, 5], [7]], 12)
    assert LabelSets.of(nested, 12) == LabelSets.from_lists(nested, 12) == sets
    head, h = sk.LinearHead(4, 12), torch.randn(2, 4)
    assert head(h, nested) == head(h, sets)
    assert head(h, [[1], [2]], unknown=nested) == head(h, [[1], [2]], unknown=sets)
    with pytest.raises(TypeError, match="do not say how many labels"):
        LabelSets.of(nested)
    with pytest.raises(TypeError, match="a nested tensor; use LabelSets"):
        LabelSets.from_dense(nested)


def test_data_frames_of_nullable_and_mixed_types():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 0, 0], "b": [0, 0, 1], "c": [1, 0, 0]})
    expected = [[0, 2], [], [1]]
    for dtype in ("Int64", "boolean", "Float32", pandas.SparseDtype(float, 0)):
        assert LabelSets.of(frame.astype(dtype)).to_lists() == expected
    assert LabelSets.of(frame.astype({"a": "boolean", "b": "Int8"})).to_lists() == expected
    head, h = sk.LinearHead(4, 3), torch.randn(3, 4)
    assert head(h, frame.astype("Int64")) == head(h, expected)
    for wrong in (frame.astype("Int64").where(frame > 0), frame.astype(str)):  # pandas.NA; texts
        with pytest.raises(TypeError, match="label_sets must be an array of booleans"):
            LabelSets.of(wrong)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: LabelSets.from_lists([[1], [2, 9]], 9), ValueError, r"label 9 in row 1 is out of range: .* 0 … 8"),
        (lambda: LabelSets.from_lists([[-1]], 9), ValueError, "label -1 in row 0"),
        (lambda: LabelSets.from_lists([1, 2], 9), TypeError, r"row 0 of lists must be a list.*\[\[…\]\]"),
        (lambda: LabelSets.from_lists(["ab"], 9), TypeError, "row 0 of lists"),
        (lambda: LabelSets.from_lists([[1.5]], 9), TypeError, "row 0 of lists holds 1.5"),
        (lambda: LabelSets.from_lists([[0, 1, 0, 0]], 4), ValueError, "row 0 .* dense target.*from_dense"),
        (lambda: LabelSets.from_lists([[1], [1, 1]], 2), ValueError, "row 1 .* dense target.*from_dense"),
        (lambda: LabelSets.from_lists(torch.eye(3, dtype=torch.int64), 3), ValueError, "row 0 .* dense target"),
        (lambda: LabelSets.from_lists([[True, False]], 9), TypeError, "holds True.*from_dense"),
        (lambda: LabelSets.from_lists(np.eye(3, dtype=bool), 3), TypeError, "holds True.*from_dense"),
        (lambda: LabelSets.from_lists([[torch.tensor(True)]], 3), TypeError, "holds tensor.True.*from_dense"),
        (lambda: LabelSets.from_lists([torch.tensor(3)], 9), TypeError, r"row 0 of lists must be a list.*\[\[…\]\]"),
        (lambda: LabelSets.collate_fn(3)([torch.eye(3).bool()[0]]), TypeError, "holds True.*from_dense"),
        (lambda: LabelSets.collate_fn(3)([]), ValueError, "batch is empty.*at least one sample"),
        (lambda: LabelSets.from_dense("abc"), TypeError, "dense must be an array.*got <U3"),
        (lambda: LabelSets.from_dense([[1], [1, 0]]), TypeError, "dense must be an array"),
        (lambda: LabelSets.from_dense(np.eye(2, dtype=complex)), TypeError, "dense must be .*got complex128"),
        (lambda: LabelSets.from_dense(torch.eye(2, dtype=torch.complex64)), TypeError, "take its real part"),
        (
            lambda: LabelSets.from_dense(torch.eye(2).to_sparse()),
            TypeError,
            "layout torch.sparse_coo; use LabelSets.from_csr",
        ),
        (lambda: LabelSets.from_csr(scipy.sparse.eye(2, dtype=complex)), TypeError, "real numbers, got .* complex128"),
        (lambda: LabelSets.from_lists([[0]], 4).to(torch.int32), TypeError, "device must be .*got torch.int32.*int64"),
        (lambda: LabelSets.from_lists([[0]], 4)[np.array([0.5])], IndexError, r"by integers or booleans, got \["),
        (lambda: LabelSets.from_lists("ab", 9), TypeError, "one list of labels per row"),
        (lambda: LabelSets.from_lists(7, 9), TypeError, "one list of labels per row"),
        (lambda: LabelSets.from_lists([[0]], 0), ValueError, "num_labels must be at least 1, got 0"),
        (lambda: LabelSets.from_lists([[0]], 2.0), TypeError, "num_labels must be a whole number, got 2.0"),
        (lambda: LabelSets.from_dense(torch.zeros(3)), ValueError, r"dense must have shape \[B, n\], got \(3,\)"),
        (lambda: LabelSets.from_dense(torch.tensor([[0, 0.5]])), ValueError, "dense holds 0.5 at row 0, label 1"),
        (lambda: LabelSets.from_dense(torch.tensor([[float("nan")]])), ValueError, "dense holds nan"),
        (lambda: LabelSets.from_csr(torch.zeros(2, 2)), ValueError, "use from_dense"),
        (lambda: LabelSets.from_lists([[0]], 2**41), ValueError, "num_labels must be at most 1099511627776, got"),
        (lambda: LabelSets.from_csr(damaged(indptr=[0, 5, 1])), ValueError, "row pointers of matrix must go from 0"),
        (lambda: LabelSets.from_csr(damaged(indptr=[0, 3, 2])), ValueError, "must not decrease, but row 1 ends"),
        (lambda: LabelSets.from_csr(damaged(indices=[0, 7])), ValueError, "label 7 in row 1 is out of range"),
        (lambda: LabelSets.from_csr(damaged(data=[1.0])), ValueError, "matrix is damaged.*1 values"),
        (lambda: LabelSets.from_dense(torch.tensor([[0, 2]])), ValueError, "holds 2 at row 0, label 1.*dense != 0"),
        (lambda: LabelSets.of(torch.eye(3), 4), ValueError, "label_sets has num_labels = 3, but 4"),
        (lambda: LabelSets.of(LabelSets.from_lists([[1]], 3), 4), ValueError, "label_sets has num_labels = 3, but 4"),
        (lambda: LabelSets.of([[1]]), TypeError, "do not say how many labels.*from_lists"),
        (lambda: LabelSets.of({"a": [1]}, 4), TypeError, "label_sets must be LabelSets.*got dict"),
        (lambda: LabelSets.of(None, 4, name="y"), TypeError, "y must be LabelSets.*got NoneType"),
        (lambda: LabelSets.of(torch.zeros(4), 4), ValueError, r"shape \[B, n\], got \(4,\); wrap one set"),
        (lambda: LabelSets.cat([]), ValueError, "parts is empty.*num_labels"),
        (
            lambda: LabelSets.cat(LabelSets.from_lists([[1]], 5)),
            TypeError,
            r"list of LabelSets, got one LabelSets; write LabelSets.cat\(\[first, second\]\)",
        ),
        (lambda: LabelSets.cat([[[1]]]), TypeError, r"parts\[0\] must be LabelSets, got list; use LabelSets.of"),
        (
            lambda: LabelSets.cat([LabelSets.from_lists([[1]], n) for n in (3, 4)]),
            ValueError,
            r"parts\[1\] has num_labels = 4 .* parts\[0\] has 3",
        ),
        (lambda: LabelSets.collate_fn(3)([{"x": 1}]), KeyError, "sample 0 has no 'labels', only 'x'.*key="),
        (lambda: LabelSets.collate_fn(3)([(1, [1]), (1, 2, [1])]), ValueError, "sample 1 has 3 entries and sample 0"),
        (lambda: LabelSets.from_csr([[1]]), TypeError, "scipy.sparse matrix"),
        (lambda: LabelSets.from_csr(scipy.sparse.csr_matrix([[0, 0.5]])), ValueError, "0.5 at row 0, label 1"),
        (lambda: LabelSets([1], torch.tensor([0, 1]), 4), TypeError, "indices must be a torch tensor"),
        (lambda: LabelSets(torch.tensor([1.0]), torch.tensor([0, 1]), 4), ValueError, "1-D integer tensor"),
        (lambda: LabelSets(torch.tensor([1]), torch.tensor([0, 2]), 4), ValueError, "offsets must go from 0 to"),
        (lambda: LabelSets(torch.tensor([1, 2]), torch.tensor([0, 3, 1, 2]), 4), ValueError, "row 1 ends before"),
        (lambda: LabelSets(torch.tensor([1, 4]), torch.tensor([0, 0, 2]), 4), ValueError, "label 4 in row 1"),
        (lambda: LabelSets(torch.tensor([1]), torch.tensor([0, 1], device="meta"), 4), ValueError, "one device"),
        (lambda: LabelSets.from_lists([[0]], 4)[1], IndexError, "row 1 is out of range for 1 label sets"),
        (lambda: LabelSets.from_lists([[0]], 4)[torch.zeros(1, 1, dtype=torch.int64)], IndexError, "one dimension"),
        (lambda: hash(LabelSets.from_lists([[0]], 4)), TypeError, "unhashable"),
    ],
)
def test_refusals(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_arrays_of_either_byte_order():
    dense = np.array([[0, 1, 1], [1, 0, 0]])
    for kind in (">f4", "<f4", ">i8"):
        assert LabelSets.from_dense(dense.astype(kind)).to_lists() == [[1, 2], [0]]


def test_sets_without_numbers_are_copied_shown_and_loaded(tmp_path):
    sets = LabelSets.from_lists([[1], [0, 2]], 4)
    torch.save(sets, tmp_path / "sets.pt")
    for made in (sets.to("meta"), torch.load(tmp_path / "sets.pt", map_location="meta")):
        twin = copy.deepcopy(made)
        assert len(twin) == 2 and twin.device.type == "meta" and "2 sets without numbers" in repr(twin)
