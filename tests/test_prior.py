"""The prior: where labels start, for every head and every form in which it is given."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch.nn.utils import parametrize

import sigkernels as sk

N = 60


def heads():
    return {
        "dft": sk.DFTHead(32, N, k=4, slack=5),
        "dft with bias": sk.DFTHead(32, N, k=4, slack=5, bias=True),
        "full": sk.LinearHead(32, N),
        "bottleneck": sk.LinearHead(32, N, bottleneck=6, bias=True),
    }


def labels(rows=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lists = [torch.randperm(N, generator=generator)[: 1 + i % 4].tolist() for i in range(rows)]
    return sk.LabelSets.from_lists(lists, N)


def start(head):
    """The log-odds of the labels at features that are 0."""
    with torch.no_grad():
        if head.proj is not None:
            head.proj.weight.zero_()
        if isinstance(head, sk.LinearHead):
            if head.proj is not None:
                head.proj.bias.zero_()
            return head(torch.zeros(1, 32))[0]
        return head(torch.zeros(1, 32))[0]


@pytest.mark.parametrize("name", heads())
def test_label_sets_set_the_frequencies_or_their_mean(name):
    head, sets = heads()[name], labels()
    head.init_prior(sets)
    counts = sets.to_dense(torch.float64).sum(0)
    expected = torch.logit((counts + 0.5) / (len(sets) + 1))
    if head.bias is None:
        mean = (counts.sum() + 0.5) / (len(sets) * N + 1)
        expected = torch.logit(mean).expand(N)
    torch.testing.assert_close(start(head).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", heads())
def test_frequencies_and_a_number(name):
    head = heads()[name]
    head.init_prior(3)
    torch.testing.assert_close(start(head), torch.full((N,), math.log(3 / (N - 3))), rtol=1e-5, atol=1e-5)
    frequencies = torch.linspace(0.01, 0.2, N)
    head.init_prior(frequencies)
    expected = torch.logit(frequencies if head.bias is not None else frequencies.mean().expand(N))
    torch.testing.assert_close(start(head), expected, rtol=1e-5, atol=1e-5)


def test_the_published_prior_is_there_by_name():
    head = sk.DFTHead(32, N, k=4, slack=5)  # the default where nothing better is known
    expected = math.sqrt(N) * math.log(4 / (N - 4))
    assert head.proj.bias[0].item() == pytest.approx(expected, rel=1e-6)
    assert not head.proj.bias[1:].any()
    head.init_prior(2)
    head.init_prior("paper")
    assert head.proj.bias[0].item() == pytest.approx(expected, rel=1e-6)
    assert sk.DFTHead(32, N, k=4, prior=None).proj.bias[1:].any()
    assert math.isfinite(sk.DFTHead(4, 1, k=0).proj.bias[0].item())


@pytest.mark.parametrize("name", heads())
def test_parameters_drawn_again_start_at_the_same_prior(name):
    head = heads()[name]
    head.init_prior(labels())
    again = copy.deepcopy(head)
    again.reset_parameters()
    torch.testing.assert_close(start(again), start(head), rtol=0, atol=0)


def test_sets_in_any_form():
    sets = labels()
    heads = [sk.LinearHead(32, N, prior=form) for form in (sets, sets.to_lists(), sets.to_dense(), sets.to_scipy())]
    assert all(torch.equal(head.bias, heads[0].bias) for head in heads)
    for form in (np.full(N, 0.25), [0.25] * N, (0.25,) * N):
        assert torch.allclose(sk.LinearHead(32, N, prior=form).bias, torch.logit(torch.tensor(0.25)))


@pytest.mark.parametrize("prior", [[[1, 2], [3]], [0.1] * N, 2.5], ids=["sets", "frequencies", "number"])
def test_a_head_that_is_made_without_data_knows_its_prior(prior):
    """transformers' from_pretrained makes models on the meta device, and takes the settings from JSON."""
    with torch.device("meta"):
        head = sk.LinearHead(32, N, prior=prior)
    head.to_empty(device="cpu").reset_parameters()
    torch.testing.assert_close(head.bias, sk.LinearHead(32, N, prior=prior).bias)


def test_constructors_and_swap_take_it():
    sets = labels()
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, N))
    swapped = sk.swap_output_layer(model, "1", k=4, slack=5, bias=True, prior=sets)
    made = sk.LinearHead(32, N, prior=sets)
    torch.testing.assert_close(swapped.bias, made.bias)


def test_a_prior_lowers_the_first_loss():
    sets, h = labels(), torch.randn(40, 32)
    head = sk.LinearHead(32, N)
    before = head.loss(h, sets)
    head.init_prior(sets)
    assert head.loss(h, sets) < 0.7 * before


@pytest.mark.parametrize(
    ("prior", "error", "words"),
    [
        ("mean", TypeError, "prior must be .*, got 'mean'"),
        (None, TypeError, "prior must be .*, got None"),
        (0, ValueError, "between 0 and num_labels = 60"),
        (60, ValueError, "between 0 and num_labels = 60"),
        (float("nan"), ValueError, "finite"),
        (torch.full((59,), 0.1), ValueError, "shape \\[59\\] for 60 labels"),
        ([0.1] * 59, ValueError, "shape \\[59\\] for 60 labels"),
        (torch.zeros(60), ValueError, "frequency 0.0, which has no finite log-odds"),
        (torch.full((60,), float("nan")), ValueError, "frequency nan"),
        (torch.full((60,), 0.1 + 0j), TypeError, "complex64, and frequencies are real"),
        (sk.LabelSets.from_lists([[1]], 50), ValueError, "50"),
        (sk.LabelSets.from_lists([], 60), ValueError, "no label sets"),
    ],
)
@pytest.mark.parametrize("name", heads())
def test_bad_priors_are_refused_and_change_nothing(name, prior, error, words):
    head = heads()[name]
    before = {key: value.clone() for key, value in head.state_dict().items()}
    with pytest.raises(error, match=words):
        head.init_prior(prior)
    assert all(torch.equal(value, before[key]) for key, value in head.state_dict().items())


def test_a_head_without_a_place_for_it_says_so():
    with pytest.raises(ValueError, match="bias=True"):
        sk.LinearHead(32, N, bottleneck=6).init_prior(3)


@pytest.mark.parametrize("form", (torch.as_tensor, torch.Tensor.numpy, lambda _: labels()))
def test_a_head_built_without_data_takes_a_prior_with_data(form):
    """``with torch.device("meta")`` moves what ``torch.as_tensor`` is given, a tensor with numbers too."""
    prior = form(torch.full((N,), 0.1))
    with torch.device("meta"):
        head = sk.DFTHead(64, N, k=3, bias=True, prior=prior)
    head = head.to_empty(device="cpu")
    head.reset_parameters()
    assert torch.equal(head.bias, sk.DFTHead(64, N, k=3, bias=True, prior=prior).bias)


def changed(head, verb, error, words) -> list[str]:
    """The entries of the state that a refused call has changed all the same."""
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(error, match=words):
        verb()
    return [name for name, value in head.state_dict().items() if not torch.equal(value, before[name])]


def test_a_projection_without_a_bias_says_so():
    head = sk.DFTHead(32, N, k=4, bias=True)
    head.proj = torch.nn.Linear(32, 9, bias=False)
    assert not changed(
        head, lambda: head.init_prior(3), TypeError, r"proj is a Linear without one; put nn.Linear\(32, 9\)"
    )
    assert not changed(head, head.reset_parameters, TypeError, r"reset_parameters sets the bias of the projection")
    assert head(torch.zeros(1, 32)).shape == (1, N)
    bottleneck = sk.LinearHead(32, N, bottleneck=6)
    bottleneck.proj = torch.nn.Linear(32, 6, bias=False)
    bottleneck.reset_parameters()  # has no need of one


@pytest.mark.parametrize("name", ["dft with bias", "bottleneck"])
def test_a_projection_that_cannot_be_drawn_again_is_refused_by_name(name):
    head = heads()[name]
    head.init_prior(3)
    head.proj = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, head.proj.out_features))
    assert not changed(head, head.reset_parameters, TypeError, r"a torch.*Sequential, .*put nn.Linear\(32, \d+\)")


PARAMETRIZATIONS = {
    "pruned": lambda module, leaf: torch.nn.utils.prune.l1_unstructured(module, leaf, 0.5),
    "parametrized": lambda module, leaf: parametrize.register_parametrization(module, leaf, torch.nn.Tanh()),
}


@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
@pytest.mark.parametrize("where", ["proj.weight", "proj.bias", "bias", "rows"])
@pytest.mark.parametrize("name", ["dft with bias", "bottleneck"])
def test_what_is_computed_is_not_drawn_without_effect(name, where, kind):
    head = heads()[name]
    head.init_prior(3)
    where = where.replace("rows", "slack_weight" if isinstance(head, sk.DFTHead) else "weight")
    owner, _, leaf = where.rpartition(".")
    PARAMETRIZATIONS[kind](head.get_submodule(owner), leaf)
    assert not changed(head, head.reset_parameters, TypeError, f"no effect on {where}, which is computed")
    if where == "bias":
        assert not changed(head, lambda: head.init_prior(3), TypeError, "init_prior would have no effect on bias")
