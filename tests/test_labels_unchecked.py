"""LabelSets whose numbers changed, or that nobody has looked at: refused wherever they are used, compiled or not."""

from __future__ import annotations

import pickle

import pytest
import torch

import sigkernels as sk
from sigkernels import LabelSets, label_forms


def test_attributes_are_read_only():
    sets = LabelSets.from_lists([[1], [2]], 5)
    for name in ("indices", "offsets", "num_labels"):
        with pytest.raises(AttributeError, match=rf"{name} of LabelSets cannot be changed; build new sets"):
            setattr(sets, name, getattr(sets, name))


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (lambda y: y.offsets.__setitem__(1, 10**6), "row 1 ends before it starts"),
        (lambda y: y.offsets.__setitem__(-1, 10**6), "offsets must go from 0 to"),
        (lambda y: y.indices.__setitem__(0, 9), "not in ascending order"),
        (lambda y: y.indices.__setitem__(0, 10**9), "label 1000000000 in row 0 is out of range"),
        (lambda y: y.indices.copy_(torch.tensor([5, 1, 3])), "not in ascending order"),
        (lambda y: y[1].fill_(-1), "label -1 in row 1"),
    ],
)
def test_writes_in_place_are_noticed(write, match):
    head = sk.LinearHead(4, 12)
    sets = LabelSets.from_lists([[1, 5], [3]], 12)
    write(sets)
    for use in (lambda: head.loss(torch.randn(2, 4), sets), sets.to_lists, lambda: pickle.dumps(sets)):
        with pytest.raises(ValueError, match=f"changed in place and are no label sets any more: .*{match}"):
            use()


def test_a_write_that_leaves_sets_is_followed():
    sets = LabelSets.from_lists([[1, 5], [3]], 12)
    sets.indices[1] = 7
    assert sets.to_lists() == [[1, 7], [3]]


def test_building_sets_inside_a_compiled_function():
    torch.manual_seed(0)
    head, h = sk.LinearHead(4, 9), torch.randn(2, 4)

    def step(h, indices, offsets):
        return head.loss(h, LabelSets(indices, offsets, 9))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for indices, offsets in (([7, 2, 4], [0, 2, 3]), ([2, 2, 7, 4], [0, 3, 4]), ([4], [0, 0, 1])):
        arguments = (h, torch.tensor(indices), torch.tensor(offsets))
        assert torch.equal(compiled(*arguments), step(*arguments))
    with pytest.raises(ValueError, match="offsets must go from 0 to"):
        compiled(h, torch.tensor([2, 7, 4]), torch.tensor([0, 2, 1000]))
    with pytest.raises(ValueError, match="label 9 in row 1"):
        compiled(h, torch.tensor([2, 7, 9]), torch.tensor([0, 2, 3]))


BROKEN = {
    "a row not in order": ([7, 2, 4], [0, 2, 3]),
    "a repeat": ([2, 2, 4], [0, 2, 3]),
    "an offset beyond the end": ([2, 7, 4], [0, 2, 1000]),
    "a negative offset": ([2, 7, 4], [0, -5, 3]),
    "a negative label": ([-2, 7, 4], [0, 2, 3]),
    "a label beyond the last": ([2, 9, 4], [0, 2, 3]),
}


@pytest.mark.parametrize(
    "loss",
    [sk.BCE(), sk.SigmoidF1(), sk.LMLNLL(2), sk.SmoothTopKSVM(2), sk.TruncatedTopKEntropy(2)],
    ids=lambda loss: type(loss).__name__,
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_wrapped_tensors_that_are_no_sets_are_refused_by_the_losses(backend, compiled, loss):
    """``from_sorted`` trusts its caller; what computes with the sets does not, in a graph either."""
    if (reason := sk.backend_status()[backend]) is not None:
        pytest.skip(reason)
    head, h = sk.LinearHead(4, 9), torch.randn(2, 4)

    def step(h, indices, offsets):
        return head.loss(h, LabelSets.from_sorted(indices, offsets, 9), loss)

    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, fullgraph=True, backend="eager")
    with sk.backend(backend):
        assert step(h, torch.tensor([2, 7, 4]), torch.tensor([0, 2, 3])).isfinite()
        for indices, offsets in BROKEN.values():
            with pytest.raises(ValueError, match="not valid label sets"):
                step(h, torch.tensor(indices), torch.tensor(offsets))


def test_the_operator_is_registered_soundly():
    arguments = (torch.tensor([7, 2, 2]), torch.tensor([0, 2, 3]), 9)
    torch.library.opcheck(label_forms.in_order_operator, arguments)


USERS = {
    "to_lists": lambda sets: sets.to_lists(),
    "iteration": lambda sets: list(sets),
    "to_dense": lambda sets: sets.to_dense(),
    "to_scipy": lambda sets: sets.to_scipy(),
    "runs": lambda sets: sets.runs(),
    "verify": lambda sets: sk.verify(torch.ones(9, 2), sets),
    "metric": lambda sets: sk.metrics.F1Metrics(9).update(sets, [[], []]),
    "prior": lambda sets: sk.LinearHead(4, 9).init_prior(sets),
    "thresholds": lambda sets: sk.LinearHead(4, 9).tune_thresholds(torch.zeros(2, 4), sets),
    "unknown": lambda sets: sk.LinearHead(4, 9).loss(torch.zeros(2, 4), [[], []], unknown=sets),
    "suggest": lambda sets: sk.suggest(sets),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("indices", "offsets"), [([10**7, 2], [0, 1, 2]), ([1, 2], [0, 10**7, 2]), ([5, 5], [0, 2, 2])]
)
def test_sets_that_nobody_looked_at_are_refused_where_they_are_used(user, indices, offsets):
    """They were read as other sets, or read and written outside of memory."""
    sets = LabelSets.from_sorted(torch.tensor(indices), torch.tensor(offsets), 9)
    with pytest.raises(ValueError, match="are not valid label sets"):
        USERS[user](sets)
