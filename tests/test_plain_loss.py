"""An ordinary step takes one call of the core: the same bits as the long way, and what is not ordinary takes that."""

import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import sigkernels as sk
from sigkernels import ops
from sigkernels.functional import dft_loss, linear_loss

plain = sys.modules["sigkernels.ops.plain_loss"]
pytestmark = pytest.mark.skipif("cpu" not in sk.available_backends(), reason="needs the compiled core")

N, S, B = 90, 7, 5
SETS = sk.LabelSets.from_lists([[3, 17], [], [5], [0, 89], [40]], N)


def tensors(dtype=torch.float32, columns=S, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, columns), (N, S), (N,)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.fixture
def long_way(monkeypatch):
    """Makes every call take the long way."""
    return lambda: monkeypatch.setattr(ops, "plain_loss", lambda *call: None)


@pytest.fixture
def one_call_only(monkeypatch):
    """Nothing but the short way is left."""

    def forbidden(*call):
        raise AssertionError("a call took the long way")

    monkeypatch.setattr(ops, "layer_loss", forbidden)


LAYERS = {
    "linear": lambda x, w, b, **kw: linear_loss(x, w, SETS, b, **kw),
    "dft": lambda x, w, b, **kw: dft_loss(x, w, SETS, N, 3, bias=b, **kw),
    "codes": lambda x, w, b, **kw: dft_loss(x, w, SETS, N, 2, bias=b, codes=16, **kw),
}
COLUMNS = {"linear": S, "dft": S + 7, "codes": S + 5 + 16}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def gradients(loss, arrays, upstream=1.0):
    for tensor in arrays:
        tensor.grad = None
    (loss * upstream).backward()
    return [tensor.grad for tensor in arrays]


@pytest.mark.parametrize("upstream", [1.0, -2.5])
@pytest.mark.parametrize("loss", [sk.BCE(), sk.BCE(label_smoothing=0.1), sk.Focal(), sk.Asymmetric()], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_same_bits_as_the_long_way(layer, dtype, loss, upstream, long_way):
    arrays = tensors(dtype, COLUMNS[layer])
    found = []
    for _ in range(2):
        for reduction in ("mean", "sum"):
            value = LAYERS[layer](*arrays, loss=loss, reduction=reduction)
            found.append([value.detach(), *gradients(value, arrays, upstream)])
        long_way()
    for short, long in zip(found[:2], found[2:], strict=True):
        for a, b in zip(short, long, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


ORDINARY = {
    "no bias": lambda x, w, b: linear_loss(x, w, SETS),
    "columns apart": lambda x, w, b: linear_loss(
        torch.cat([x, x], 1)[:, ::2][:, :S], w.repeat(1, 2)[:, ::2][:, :S], SETS
    ),
    "rows apart": lambda x, w, b: linear_loss(x.repeat(2, 1)[::2], w, SETS, b),
    "nothing recorded": lambda x, w, b: torch.no_grad()(linear_loss)(x, w, SETS, b),
    "inference": lambda x, w, b: torch.inference_mode()(linear_loss)(x, w, SETS, b),
    "no gradient needed": lambda x, w, b: linear_loss(x.detach(), w.detach(), SETS),
    "a head": lambda x, w, b: sk.LinearHead(S, N).loss(x, SETS),
    "a bottleneck": lambda x, w, b: sk.LinearHead(S, N, bottleneck=3).loss(x, SETS, sk.Focal(), "sum"),
    "a DFT head": lambda x, w, b: sk.DFTHead(S, N, 2, 4, bias=True, codes=16)(x, SETS),
    "forced": lambda x, w, b: in_backend("cpu", x, w),
}


def in_backend(name, x, w):
    with sk.backend(name):
        return linear_loss(x, w, SETS)


@pytest.mark.parametrize("case", ORDINARY)
@pytest.mark.filterwarnings("ignore:.*in_features")
def test_takes_one_call(case, one_call_only):
    assert ORDINARY[case](*tensors()).shape == ()


OTHERS = {
    "rows in three dimensions": lambda x, w, b: linear_loss(x[None], w, SETS, b),
    "dense targets": lambda x, w, b: linear_loss(x, w, SETS.to_dense(), b),
    "lists": lambda x, w, b: linear_loss(x, w, SETS.to_lists(), b),
    "each row": lambda x, w, b: linear_loss(x, w, SETS, b, reduction="none"),
    "weights of labels": lambda x, w, b: linear_loss(x, w, SETS, b, loss=sk.BCE(pos_weight=torch.full((N,), 2.0))),
    "a loss of columns": lambda x, w, b: linear_loss(x, w, SETS, b, loss=sk.SigmoidF1()),
    "torch": lambda x, w, b: in_backend("torch", x, w),
    "autocast": lambda x, w, b: torch.autocast("cpu", torch.bfloat16)(linear_loss)(x, w, SETS, b),
    "transformed": lambda x, w, b: torch.func.grad(lambda x: linear_loss(x, w.detach(), SETS))(x.detach()),
    "traced": lambda x, w, b: torch.compile(lambda x: linear_loss(x, w, SETS), backend="eager", fullgraph=True)(x),
    "a class of tensors": lambda x, w, b: linear_loss(x.detach().as_subclass(Named), w, SETS),
    "numbers as tensors": lambda x, w, b: dft_loss(torch.cat([x, x], 1), w, SETS, torch.tensor(N), 3),
}


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize("case", OTHERS)
def test_takes_the_long_way(case, monkeypatch):
    taken, original = [], ops.layer_loss
    monkeypatch.setattr(ops, "layer_loss", lambda *call: taken.append(1) or original(*call))
    OTHERS[case](*tensors())
    assert taken or case == "traced"


def freed(x):
    x = x.detach().clone()
    x.untyped_storage().resize_(0)
    return x


WRONG = {
    "columns of x": lambda x, w, b: linear_loss(x[:, 1:], w, SETS),
    "columns of a DFT": lambda x, w, b: dft_loss(x, w, SETS, N, 3),
    "rows of the targets": lambda x, w, b: linear_loss(x[1:], w, SETS),
    "labels of the targets": lambda x, w, b: linear_loss(x, w[1:], SETS),
    "bias": lambda x, w, b: linear_loss(x, w, SETS, b[1:]),
    "bias in columns": lambda x, w, b: linear_loss(x, w, SETS, b[:, None]),
    "another dtype": lambda x, w, b: linear_loss(x.double(), w, SETS),
    "dtype of the bias": lambda x, w, b: linear_loss(x, w, SETS, b.double()),
    "whole numbers": lambda x, w, b: linear_loss(x.long(), w.long(), SETS),
    "complex": lambda x, w, b: linear_loss(x.to(torch.complex64), w, SETS),
    "sparse": lambda x, w, b: linear_loss(x.detach().to_sparse(), w, SETS),
    "no tensor": lambda x, w, b: linear_loss(x.tolist(), w, SETS),
    "no loss": lambda x, w, b: linear_loss(x, w, SETS, loss="bce"),
    "a class": lambda x, w, b: linear_loss(x, w, SETS, loss=sk.BCE),
    "reduction": lambda x, w, b: linear_loss(x, w, SETS, reduction="average"),
    "reductions": lambda x, w, b: linear_loss(x, w, SETS, reduction=["mean"]),
    "k": lambda x, w, b: dft_loss(x, w, SETS, N, 1.0),
    "too many waves": lambda x, w, b: dft_loss(x, w, SETS, N, 45),
    "codes": lambda x, w, b: dft_loss(x, w, SETS, N, 1, codes=17),
    "offsets that fall": lambda x, w, b: linear_loss(x, w, unsorted([0, 2, 1, 3, 5, 6])),
    "offsets of other rows": lambda x, w, b: linear_loss(x, w, unsorted([0, 6])),
    "labels out of order": lambda x, w, b: linear_loss(x, w, unsorted([0, 6, 6, 6, 6, 6])),
    "a head of another width": lambda x, w, b: replaced(torch.randn(N, S - 2)).loss(x[:, 2:], SETS),
    "a head of other labels": lambda x, w, b: replaced(torch.randn(N - 2, S)).loss(x, SETS),
}


def unsorted(offsets):
    return sk.LabelSets.from_sorted(torch.tensor([3, 17, 5, 0, 89, 40]), torch.tensor(offsets), N)


def replaced(weight):
    head = sk.LinearHead(S, N)
    head.weight = torch.nn.Parameter(weight)
    return head


@pytest.mark.parametrize("case", WRONG)
def test_the_same_refusal_as_the_long_way(case, long_way):
    said = []
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)) as refusal:
            WRONG[case](*tensors())
        said.append((refusal.type, str(refusal.value)))
        long_way()
    assert said[0] == said[1]


def test_sets_that_were_changed_in_place_are_checked_again():
    x, w, _ = tensors()
    indices = torch.tensor([3, 17, 5, 0, 89, 40])
    sets = sk.LabelSets.from_sorted(indices, torch.tensor([0, 2, 2, 3, 5, 6]), N)
    assert torch.equal(linear_loss(x, w, sets), linear_loss(x, w, SETS))
    indices[0] = 4
    fewer = sk.LabelSets.from_lists([[4, 17], [], [5], [0, 89], [40]], N)
    assert torch.equal(linear_loss(x, w, sets), linear_loss(x, w, fewer))
    indices[0] = N
    with pytest.raises(ValueError, match="changed in place"):
        linear_loss(x, w, sets)


@pytest.mark.parametrize("freed_one", [0, 1])
def test_tensors_whose_memory_is_gone_are_refused(freed_one):
    arrays = tensors()[:2]
    arrays[freed_one] = freed(arrays[freed_one])
    with pytest.raises((ValueError, RuntimeError)):
        linear_loss(*arrays, SETS)


@pytest.mark.parametrize("way", [dict(reduction="mean"), dict(reduction="none")], ids=["one call", "long"])
def test_lazily_negated_tensors_have_their_sign(way):
    """torch keeps the imaginary part of a conjugate as the numbers of the tensor itself and a mark."""
    _, w, b = tensors()
    negated = torch._neg_view(torch.randn(B, S))
    assert negated.is_neg() and negated.is_contiguous()
    want = linear_loss(negated.resolve_neg(), w, SETS, b, **way)
    assert torch.equal(linear_loss(negated, w, SETS, b, **way), want)


def test_number_of_threads_is_followed():
    x, w = torch.randn(B, 64), torch.randn(N, 64)
    many = sk.LabelSets.from_lists([[1]] * B, N)
    before = torch.get_num_threads()
    try:
        values = []
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            values.append(linear_loss(x, w, many))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


def test_backward_through_a_kept_graph_and_over_changed_inputs():
    x, w, b = tensors()
    loss = linear_loss(x, w, SETS, b)
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    again = torch.autograd.grad(3 * loss, (x, w, b), retain_graph=True)
    for a, c in zip(first, again, strict=True):
        assert torch.allclose(3 * a, c)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, (x, w, b))


def test_a_second_derivative_is_refused():
    x, w, _ = tensors()
    (grad,) = torch.autograd.grad(linear_loss(x, w, SETS), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_forward_derivatives_are_refused_and_not_dropped():
    x, w, _ = (tensor.detach() for tensor in tensors())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        linear_loss(forward_ad.make_dual(x, torch.ones_like(x)), w, SETS)


def test_hooks_see_the_gradients():
    x, w, b = tensors()
    seen = []
    x.register_hook(lambda grad: seen.append(grad.shape))
    w.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.shape))
    loss = linear_loss(x, w, SETS, b)
    loss.register_hook(lambda grad: 2 * grad)
    loss.backward()
    doubled = x.grad
    x.grad = None
    linear_loss(x, w, SETS, b).backward()
    assert sorted(seen[:2]) == [x.shape, w.shape] and torch.equal(doubled, 2 * x.grad)


def test_only_what_needs_a_gradient_gets_one():
    x, w, b = tensors()
    w.requires_grad_(False)
    linear_loss(x, w, SETS, b).backward()
    assert x.grad is not None and w.grad is None and b.grad is not None


def test_nothing_is_kept():
    x, w, b = tensors()
    loss = sk.Focal(gamma=1.5)
    things = (x, w, b, loss, SETS, *SETS.unchecked())
    linear_loss(x, w, SETS, b, loss=loss).backward()
    gc.collect()  # what other tests have left of the shared label sets
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(50):
        value = linear_loss(x, w, SETS, b, loss=loss)
        value.backward()
        held = [weakref.ref(value), weakref.ref(w.grad), weakref.ref(x.grad)]
        x.grad = w.grad = b.grad = None
        del value
    gc.collect()
    assert [sys.getrefcount(thing) for thing in things] == before
    assert not any(reference() for reference in held)


def test_losses_with_tensors_are_not_remembered():
    x, w, _ = tensors()
    linear_loss(x, w, SETS)
    before = len(plain._known)
    weights = torch.ones(N)
    loss = sk.BCE(weight=weights)
    linear_loss(x, w, SETS, loss=loss)
    kept = weakref.ref(weights)
    del loss, weights
    gc.collect()
    assert len(plain._known) == before and kept() is None


def test_what_is_remembered_is_bounded():
    x, w, _ = tensors()
    for step in range(2 * plain._MOST_KNOWN):
        linear_loss(x, w, SETS, loss=sk.BCE(label_smoothing=step / 1000))
        assert len(plain._known) <= plain._MOST_KNOWN


def test_threads_may_share_a_layer():
    x, w, b = (tensor.detach() for tensor in tensors())
    batches = [(x[:rows], sk.LabelSets.from_lists(SETS.to_lists()[:rows], N)) for rows in range(1, B + 1)]
    want = [linear_loss(rows, w, sets, b) for rows, sets in batches]
    wrong = []

    def work(first):
        for turn in range(100):
            at = (first + turn) % B
            rows, sets = batches[at]
            if not torch.equal(linear_loss(rows, w, sets, b), want[at]):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
