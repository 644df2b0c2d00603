"""Heads as modules: sizes, state, copies, dtypes, the published layer, and swapping one in."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import random_sets
from torch import nn

import sigkernels as sk

HEADS = {
    "dft": lambda **kw: sk.DFTHead(24, 60, k=4, slack=5, **kw),
    "dft-no-slack": lambda **kw: sk.DFTHead(24, 60, k=4, **kw),
    "linear": lambda **kw: sk.LinearHead(24, 60, **kw),
    "bottleneck": lambda **kw: sk.LinearHead(24, 60, bottleneck=6, **kw),
}


@pytest.fixture(params=list(HEADS))
def make(request):
    return HEADS[request.param]


def test_verbs_agree_with_the_weight_matrix(make):
    head = make(dtype=torch.float64)
    h, sets = torch.randn(7, 24, dtype=torch.float64), random_sets(7, 60)
    bias = getattr(head, "bias", None)
    z = nn.functional.linear(head.features(h), head.weight_matrix(), bias)
    torch.testing.assert_close(head(h), z)
    want = nn.functional.binary_cross_entropy_with_logits(z, sets.to_dense(torch.float64))
    torch.testing.assert_close(head.loss(h, sets), want)
    values, labels = head.topk(h, 5)
    torch.testing.assert_close(values, z.topk(5).values)
    torch.testing.assert_close(z.gather(1, labels), values)
    assert head.predict(h) == sk.LabelSets.from_dense(z > 0)
    assert head.weight_matrix(torch.float32).dtype == torch.float32


def test_leading_dimensions(make):
    head = make()
    h, sets = torch.randn(2, 3, 24), random_sets(6, 60)
    assert head(h).shape == (2, 3, 60)
    assert head(h[0, 0]).shape == (60,)
    assert head.loss(h, sets, reduction="none").shape == (2, 3)
    assert head.topk(h, 4)[0].shape == (2, 3, 4)
    assert len(head.predict(h)) == 6
    assert head(torch.randn(0, 24)).shape == (0, 60)
    assert len(head.predict(torch.randn(0, 24))) == 0


def test_state_round_trips(make):
    head, other = make(), make()
    h = torch.randn(3, 24)
    other.load_state_dict(head.state_dict())
    for twin in (other, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(twin(h), head(h))
        assert repr(twin) == repr(head)
    assert "num_labels=60" in repr(head)


def test_dtypes_and_devices(make):
    head = make().to(torch.float64)
    assert head(torch.randn(2, 24, dtype=torch.float64)).dtype == torch.float64
    half = make(dtype=torch.bfloat16)
    assert half(torch.randn(2, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert make(device="meta").to_empty(device="cpu")(torch.randn(2, 24)).shape == (2, 60)


def test_gradients_reach_every_parameter(make):
    head = make()
    head.loss(torch.randn(4, 24), random_sets(4, 60)).backward()
    for name, parameter in head.named_parameters():
        assert parameter.numel() == 0 or parameter.grad.abs().max() > 0, name


def test_accumulate_grad(make):
    head, twin = (m := make()), copy.deepcopy(m)
    h, sets = torch.randn(4, 24), random_sets(4, 60)
    for _ in range(2):
        head.loss(h, sets, accumulate_grad=True).backward()
        twin.loss(h, sets).backward()
    for ours, want in zip(head.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, want.grad)
    with torch.no_grad():
        head.loss(h, sets, accumulate_grad=True)
    for ours, want in zip(head.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, want.grad)


def test_accumulate_grad_refuses_what_it_cannot_do():
    head = HEADS["dft"]()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="not under autocast"):
        head.loss(torch.randn(4, 24), random_sets(4, 60), accumulate_grad=True)
    head.requires_grad_(False)
    with pytest.raises(ValueError, match="require a gradient"):
        head.loss(torch.randn(4, 24), random_sets(4, 60), accumulate_grad=True)


def test_parameters_are_those_of_the_formula():
    count = {name: sum(p.numel() for p in build().parameters()) for name, build in HEADS.items()}
    assert count["dft"] == (24 + 1) * (2 * 4 + 1 + 5) + 60 * 5
    assert count["linear"] == 60 * 24 + 60
    assert count["bottleneck"] == (24 + 1) * 6 + 60 * 6


def test_init_prior():
    head = sk.LinearHead(8, 100)
    head.init_prior(5)
    nn.init.zeros_(head.weight)
    torch.testing.assert_close(torch.sigmoid(head(torch.zeros(1, 8))), torch.full((1, 100), 0.05))
    plain = sk.DFTHead(24, 60, k=4, slack=5, init_prior=False)
    assert plain.proj.bias[1:].abs().max() > 0
    plain.init_prior()
    assert plain.proj.bias[1:].abs().max() == 0
    with pytest.raises(ValueError, match="bias=True"):
        sk.LinearHead(8, 100, bottleneck=3).init_prior(5)
    with pytest.raises(ValueError, match="active must lie between"):
        head.init_prior(0)


def test_loads_the_published_layer():
    k, n, s, e = 3, 40, 5, 16
    state = {"proj.weight": torch.randn(12, e), "proj.bias": torch.randn(12), "Ws.weight": torch.randn(n, s)}
    head = sk.DFTHead.from_spmlbl(state, k)
    h = torch.randn(6, e)
    w = torch.cat([sk.dft_matrix(n, k, dtype=torch.float32), state["Ws.weight"]], 1)
    torch.testing.assert_close(head(h), (h @ state["proj.weight"].T + state["proj.bias"]) @ w.T)
    with pytest.raises(ValueError, match=r"state_dict lacks Ws\.weight; it has proj\.weight, proj\.bias"):
        sk.DFTHead.from_spmlbl({key: value for key, value in state.items() if key != "Ws.weight"}, k)
    with pytest.raises(ValueError, match="do not fit k = 4"):
        sk.DFTHead.from_spmlbl(state, 4)


def test_a_narrow_projection_warns_that_the_guarantee_is_gone():
    with pytest.warns(UserWarning, match=r"in_features = 4 is less than 2k\+1\+slack = 9"):
        sk.DFTHead(4, 60, k=4)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: sk.DFTHead(24, 8, k=4), ValueError, "Use k ≤ 3"),
        (lambda: sk.DFTHead(0, 60, k=4), ValueError, "in_features must be at least 1"),
        (lambda: sk.DFTHead(24, 60, k=4, slack=-1), ValueError, "slack must be at least 0"),
        (lambda: sk.DFTHead(24, 60, k=4, slack=1.5), TypeError, "slack must be a whole number"),
        (lambda: sk.LinearHead(24, 60, bottleneck=0), ValueError, "bottleneck must be at least 1"),
        (lambda: sk.LinearHead(24, "60"), TypeError, "num_labels must be a whole number"),
        (lambda: HEADS["dft"]()(torch.zeros(2, 23)), ValueError, r"in_features = 24, got shape \(2, 23\)"),
        (lambda: HEADS["linear"]()([1.0]), TypeError, "h must be a tensor"),
        (lambda: HEADS["linear"]().loss(torch.zeros(2, 24), [[60], []]), ValueError, "label 60 in row 0"),
        (lambda: HEADS["linear"]().topk(torch.zeros(2, 24), 61), ValueError, "m must lie in 1 … num_labels = 60"),
    ],
)
def test_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 50)])
        self.classifier = nn.Linear(32, 50)

    def forward(self, x):
        return self.classifier(self.encoder(x))


@pytest.mark.parametrize("name", ["classifier", "encoder.0", "layers.1"])
def test_swap(name):
    model = Model().double().eval()
    old = model.get_submodule(name)
    head = sk.swap_output_layer(model, name, k=3, slack=1)
    assert model.get_submodule(name) is head
    assert (head.in_features, head.num_labels) == (old.in_features, old.out_features)
    assert head.slack_weight.dtype == torch.float64 and not head.training
    if name == "classifier":
        assert model(torch.randn(2, 8, dtype=torch.float64)).shape == (2, 50)


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("head", ValueError, "no layer 'head'; its linear layers are encoder.0, layers.0, layers.1, classifier"),
        ("", ValueError, "dotted name"),
        ("encoder.1", TypeError, "layer 'encoder.1' is ReLU, not an initialised nn.Linear"),
        ("encoder", TypeError, "is Sequential"),
    ],
)
def test_swap_refusals(name, error, match):
    model = Model()
    before = repr(model)
    with pytest.raises(error, match=match):
        sk.swap_output_layer(model, name, k=3, slack=1)
    assert repr(model) == before
    with pytest.raises(ValueError, match="Use k ≤ 24"):
        sk.swap_output_layer(model, "classifier", k=25, slack=1)
    assert repr(model) == before
    with pytest.raises(TypeError, match="model must be"):
        sk.swap_output_layer("model", "classifier", k=3)
