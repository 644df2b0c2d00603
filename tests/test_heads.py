"""Heads as modules: sizes, state, copies, dtypes, the published layer, and swapping one in."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.utils.prune
from cases import random_sets
from torch import nn

import sigkernels as sk

HEADS = {
    "dft": lambda **kw: sk.DFTHead(24, 60, k=4, slack=5, **kw),
    "dft-no-slack": lambda **kw: sk.DFTHead(24, 60, k=4, **kw),
    "codes": lambda **kw: sk.DFTHead(24, 60, k=1, slack=2, codes=16, bias=True, **kw),
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


def test_forward_with_targets_is_the_loss(make):
    head = make()
    h, sets = torch.randn(4, 24), random_sets(4, 60)
    assert torch.equal(head(h, sets), head.loss(h, sets))
    assert torch.equal(head(h, sets, sk.Focal(), "none"), head.loss(h, sets, sk.Focal(), reduction="none"))
    assert torch.equal(head(h, None), head(h))
    with pytest.raises(ValueError, match="given without targets"):
        head(h, loss=sk.Focal())
    with pytest.raises(ValueError, match="given without targets"):
        head(h, reduction="sum")
    with pytest.raises(TypeError, match=r"targets must be LabelSets.*got None"):
        head.loss(h, None)


def test_every_verb_fires_hooks(make):
    head, seen = make(), []
    head.register_forward_pre_hook(lambda *_: seen.append("before"))
    head.register_forward_hook(lambda *_: seen.append("after"))
    h = torch.randn(2, 24)
    for verb in (lambda: head(h), lambda: head.loss(h, [[1], []]), lambda: head.topk(h, 2), lambda: head.predict(h)):
        seen.clear()
        verb()
        assert seen == ["before", "after"]


def test_module_compile_covers_every_verb():
    torch._dynamo.reset()
    head, h, sets = HEADS["dft"](), torch.randn(4, 24), random_sets(4, 60)
    want = (head(h), head(h, sets), *head.topk(h, 3), head.predict(h))
    head.compile(backend="eager")
    assert head.predict(h) == want[-1]
    for ours, eager in zip((head(h), head(h, sets), *head.topk(h, 3)), want, strict=False):
        assert torch.equal(ours, eager)


REPARAMETRIZATIONS = {
    "prune": lambda head, name: nn.utils.prune.l1_unstructured(head, name, 0.5),
    "old weight_norm": lambda head, name: nn.utils.weight_norm(head, name),
    "old spectral_norm": lambda head, name: nn.utils.spectral_norm(head, name),
    "weight_norm": lambda head, name: nn.utils.parametrizations.weight_norm(head, name),
    "spectral_norm": lambda head, name: nn.utils.parametrizations.spectral_norm(head, name),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("kind", REPARAMETRIZATIONS)
@pytest.mark.parametrize("head", ["dft", "linear", "bottleneck"])
def test_verbs_see_what_torch_makes_of_the_weight(head, kind):
    head = HEADS[head]()
    name = "slack_weight" if isinstance(head, sk.DFTHead) else "weight"
    REPARAMETRIZATIONS[kind](head, name)
    optimizer = torch.optim.SGD(head.parameters(), 0.01)
    h, sets = torch.randn(4, 24), random_sets(4, 60)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = head.loss(h, sets, reduction="sum")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    head.eval()  # spectral_norm moves on at every call in training
    for verb in (lambda: head.topk(h, 60)[0].sort().values, lambda: head(h).sort().values):
        with torch.no_grad():
            next(iter(p for n, p in head.named_parameters() if "proj" not in n)).mul_(0.9)
        values = verb()  # not those of the last call
        torch.testing.assert_close(values, head(h).sort().values)
    assert head.predict(h) == sk.LabelSets.from_dense(head(h) > 0)


@pytest.mark.parametrize(
    ("head", "name", "shape", "match"),
    [
        ("dft", "slack_weight", (30, 5), r"slack_weight has shape \[30, 5\].*made for \[60, 5\]"),
        ("dft", "slack_weight", (60, 6), r"slack_weight has shape \[60, 6\].*made for \[60, 5\]"),
        ("dft", "proj.weight", (13, 24), r"proj.weight has shape \[13, 24\].*made for \[14, 24\]"),
        ("dft", "proj.bias", (13,), r"proj.bias has shape \[13\].*made for \[14\]"),
        ("linear", "weight", (30, 24), r"weight has shape \[30, 24\].*made for \[60, 24\]"),
        ("linear", "bias", (30,), r"bias has shape \[30\].*made for \[60\]"),
        ("bottleneck", "weight", (60, 7), r"weight has shape \[60, 7\].*made for \[60, 6\]"),
        ("bottleneck", "proj.weight", (7, 24), r"proj.weight has shape \[7, 24\].*made for \[6, 24\]"),
    ],
)
def test_parameters_of_another_size_are_refused(head, name, shape, match):
    head, h = HEADS[head](), torch.randn(2, 24)
    owner, _, leaf = name.rpartition(".")
    setattr(head.get_submodule(owner), leaf, nn.Parameter(torch.zeros(shape)))
    for verb in (lambda: head(h), lambda: head.loss(h, [[1], []]), lambda: head.topk(h, 2), lambda: head.predict(h)):
        with pytest.raises(ValueError, match=match):
            verb()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_another_dtype_is_refused_alike(make, dtype):
    match = rf"all inputs must have one dtype, got . {dtype}, .*weight torch.float32.*use torch.autocast"
    with pytest.raises(TypeError, match=match):
        make()(torch.randn(2, 24).to(dtype))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_traces_logits(make):
    head, h = make(), torch.randn(3, 24)
    traced, other = torch.jit.trace(head, h), torch.randn(5, 24)
    torch.testing.assert_close(traced(other), head(other), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"record the logits head\(h\).*use torch.export"):
        torch.jit.trace(lambda h: head.topk(h, 2), h)


def test_exports_to_onnx(make, tmp_path):
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    head, dynamic = make().eval().requires_grad_(False), ({0: torch.export.Dim.AUTO},)
    torch.onnx.export(
        head, (torch.randn(3, 24),), tmp_path / "h.onnx", dynamo=True, dynamic_shapes=dynamic, verbose=False
    )
    session, other = ReferenceEvaluator(onnx.load(tmp_path / "h.onnx")), torch.randn(5, 24)
    (logits,) = session.run(None, {session.input_names[0]: other.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), head(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("verb", ("loss", "topk"))
def test_what_onnx_cannot_hold_says_what_to_export(verb):
    pytest.importorskip("onnxscript")
    calls = {"loss": lambda head, h: head(h, torch.zeros(2, 40)), "topk": lambda head, h: head.topk(h, 3)}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = sk.LinearHead(6, 40)

        def forward(self, h):
            return calls[verb](self.head, h)

    with pytest.raises(RuntimeError, match="take the loss, topk or predict from the logits"):
        torch.onnx.export(Model().eval(), (torch.randn(2, 6),), dynamo=True, verbose=False)


def test_plain_layers_give_the_same_logits(make):
    head, h = make(dtype=torch.float64).eval(), torch.randn(3, 24, dtype=torch.float64)
    plain = head.to_linear()
    assert {type(layer) for layer in plain} == {nn.Linear} and not plain.training
    torch.testing.assert_close(plain(h), head(h))
    plain[-1].weight.data.zero_()
    assert head.weight_matrix().abs().max() > 0


def test_reset_parameters_restores_the_start(make):
    """Also of a head that was made without data."""
    head, other = make(), make(device="meta").to_empty(device="cpu")
    for each in (head, other):
        torch.manual_seed(1)
        each.reset_parameters()
    for ours, want in zip(other.parameters(), head.parameters(), strict=True):
        assert torch.equal(ours, want)
    if isinstance(head, sk.DFTHead):
        assert torch.equal(other.proj.bias, make().proj.bias)  # the prior


def test_parameters_are_those_of_the_formula():
    count = {name: sum(p.numel() for p in build().parameters()) for name, build in HEADS.items()}
    assert count["dft"] == (24 + 1) * (2 * 4 + 1 + 5) + 60 * 5
    assert count["linear"] == 60 * 24 + 60
    assert count["bottleneck"] == (24 + 1) * 6 + 60 * 6


def bottlenecks():
    torch.manual_seed(0)
    return {
        "head": sk.LinearHead(64, 60, bottleneck=6),
        "head with bias": sk.LinearHead(64, 60, bottleneck=6, bias=True),
        "sequential": nn.Sequential(nn.Linear(64, 6), nn.Linear(6, 60)),
        "sequential without biases": nn.Sequential(nn.Linear(64, 6, bias=False), nn.Linear(6, 60, bias=False)),
    }


@pytest.mark.parametrize("codes", [0, 16])
@pytest.mark.parametrize("name", bottlenecks())
def test_a_trained_bottleneck_becomes_a_dft_head_with_the_same_logits(name, codes):
    trained = bottlenecks()[name].eval()
    head = sk.DFTHead.from_linear(trained, k=4, codes=codes)
    h = torch.randn(7, 64)
    torch.testing.assert_close(head(h), trained(h), rtol=1e-5, atol=1e-6)
    assert (head.slack, head.k, head.codes, head.training) == (6, 4, codes, False)
    torch.testing.assert_close(head.to_linear()(h), trained(h), rtol=1e-5, atol=1e-6)
    head.loss(h, [[1, 2]] * 7).backward()
    assert head.proj.weight.grad[1:9].abs().max() > 0  # the features of the DFT learn


def test_what_has_no_bottleneck_is_not_upgraded():
    for full in (sk.LinearHead(64, 60), nn.Linear(64, 60)):
        with pytest.raises(TypeError, match=r"no bottleneck.*swap_output_layer"):
            sk.DFTHead.from_linear(full, k=4)
    for wrong in (nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 60)), nn.Conv1d(1, 1, 1), None):
        with pytest.raises(TypeError, match="trained must be a LinearHead with a bottleneck"):
            sk.DFTHead.from_linear(wrong, k=4)


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
    with pytest.raises(TypeError, match="k must be a whole number, got '2'"):
        sk.DFTHead.from_spmlbl(state, k="2")


def test_a_narrow_projection_warns_that_the_guarantee_is_gone():
    with pytest.warns(UserWarning, match=r"in_features = 4 is less than 2k\+1\+codes\+slack = 9"):
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


def test_swap_replaces_a_layer_under_all_its_names():
    model = Model()
    model.also = nn.Module()
    model.also.out = model.classifier
    head = sk.swap_output_layer(model, "classifier", k=3, slack=1)
    assert model.classifier is head and model.also.out is head


def test_swap_refuses_tied_weights():
    model = Model()
    model.embedding = nn.Embedding(50, 32)
    model.classifier.weight = model.embedding.weight
    with pytest.raises(ValueError, match=r"'classifier' shares a parameter with 'embedding.weight'.*clone\(\)"):
        sk.swap_output_layer(model, "classifier", k=3, slack=1)
    assert isinstance(model.classifier, nn.Linear)
    model.classifier.weight = nn.Parameter(model.classifier.weight.detach().clone())
    assert isinstance(sk.swap_output_layer(model, "classifier", k=3, slack=1), sk.DFTHead)
