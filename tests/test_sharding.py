"""Heads sharded over two processes: the same numbers as on one, and a state dict that loads on either."""

from __future__ import annotations

import pytest
import torch
from cases import join, leave, random_sets
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import sigkernels as sk

N, K, S, WIDTH = 101, 4, 5, 20


def head_and_batch(**mesh):
    torch.manual_seed(3)
    head = sk.DFTHead(WIDTH, N, K, S, dtype=torch.float64, **mesh)
    torch.manual_seed(4)
    return head, torch.randn(6, WIDTH, dtype=torch.float64), random_sets(6, N)


def results(head, h, sets):
    """Everything a head gives, and all its gradients."""
    h = h.clone().requires_grad_()
    loss = sk.BCE(weight=torch.linspace(0.5, 1.5, N, dtype=torch.float64))
    total = (
        head.loss(h, sets, loss)
        + head.loss(h, sets.to_dense(torch.float64), reduction="none") @ torch.arange(6.0, dtype=torch.float64)
        + head(h).square().mean()
    )
    total.backward()
    values, labels = head.topk(h, 60)
    found, per_label = head.predict(h, 0.04), head.predict(h, torch.linspace(0.01, 0.2, N))
    return {
        "total": total.detach(),
        "grad_h": h.grad,
        "grad_proj": head.proj.weight.grad,
        "logits": head(h).detach(),
        "values": values.detach(),
        "labels": labels,
        "found": found.indices,
        "found_at": found.offsets,
        "found per label": per_label.indices,
        "weight": head.weight_matrix(),
        **{f"state {key}": value for key, value in whole_state(head).items()},
    }


def whole_state(module):
    """The state dict on one process: gathered where it is sharded."""
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))


def clipped(head, h, sets, norm_type):
    """The norm of all gradients and the clipped gradient of the projection, after one step's backward."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64), head)
    torch.nn.init.eye_(model[0].weight)
    torch.nn.init.zeros_(model[0].bias)
    head.zero_grad()
    head.loss(model[0](h), sets, reduction="sum").backward()
    norm = sk.clip_grad_norm_(model, 0.1, norm_type)
    return {f"norm {norm_type}": norm, f"clipped {norm_type}": head.proj.weight.grad, "encoder": model[0].weight.grad}


def _check_clipping(head, h, sets):
    """torch's function refuses a mixture, is right on DTensors alone; and a norm that is not finite."""
    head.zero_grad()
    head.loss(h, sets).backward()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1e9)
    norm = torch.nn.utils.clip_grad_norm_([head.slack_weight], 1e9).full_tensor()
    torch.testing.assert_close(norm, head.slack_weight.grad.full_tensor().norm())
    if head.shard.rank == 1:
        head.slack_weight.grad.to_local()[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="is nan; nothing was clipped"):  # on both ranks
        sk.clip_grad_norm_(head, 1.0, error_if_nonfinite=True)


def _check_batches(head, h, sets, monkeypatch):
    """Batches that differ between ranks are refused on every rank; those that differ by rounding alone on request."""
    rank = head.shard.rank
    other_sets = sets if rank == 0 else random_sets(6, N, seed=9)
    for words, call in {
        "different h": lambda: head.topk(h if rank else h.flip(0), 3),
        "different h: ": lambda: head.loss(h[: 6 - rank], sets[: 6 - rank]),
        "different targets": lambda: head.loss(h, other_sets),
        "different settings": lambda: head.loss(h, sets, sk.Focal(gamma=2.0 + rank)),
        "different verb": lambda: head.predict(h) if rank else head(h),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    head.loss(h * (1 + 1e-5 * rank), sets)
    head.check_batches = False
    head.loss(h, other_sets)
    head.check_batches = True
    with pytest.raises(ValueError, match="different h"):
        head.loss(h * (1 + 1e-5 * rank), sets)
    head.loss(h, sets)
    head.loss(h, sets.to_dense())
    head.loss(h, [list(map(int, row)) for row in sets])
    # Equal settings and targets, wherever their memory is and however their lists are shared.
    weight = torch.ones(N, dtype=torch.float64)
    unknown = random_sets(6, N, seed=2)
    head.loss(h, sets, sk.BCE(weight=weight), unknown=unknown)
    head.loss(h, [[1]] * 6 if rank else [[1] for _ in range(6)], sk.SigmoidF1(beta=weight, eta=-weight))
    head.loss(h, sets.to_scipy())
    head.loss(h, sets.to_dense().numpy())
    with pytest.raises(ValueError, match="different settings: rank 0: tuple, checksum"):
        head.loss(h, sets, sk.BCE(weight=weight + rank), unknown=unknown)
    head.topk(h, 3), head.predict(h), head(h)
    with pytest.raises(ValueError, match=r"different targets: rank 0: 6 label sets, .*; rank 1: 6 label sets"):
        head.loss(h, other_sets)
    with pytest.raises(ValueError, match="different h: rank 0"):
        head.topk(h + rank, 3)
    with pytest.raises(ValueError, match="different settings: rank 0: 3; rank 1: 4"):
        head.topk(h, 3 + rank)
    with pytest.raises(ValueError, match="different verb: rank 0: 'logits'; rank 1: 'predict'"):
        head.predict(h) if rank else head(h)
    head.check_batches = False
    monkeypatch.setenv("SIGKERNELS_DEBUG", "1")
    with pytest.raises(ValueError, match="different targets"):
        head.loss(h, other_sets)


def _check_compiled(head, h, sets):
    """torch.compile leaves a sharded head alone: its graph ends before it and goes on behind it."""
    eager, found = head.loss(h, sets), head.predict(h, 0.04)
    assert torch.equal(torch.compile(head)(h, sets), eager)
    assert torch.equal(torch.compile(lambda h: head.loss(h + 0, sets) * 1)(h), eager)
    assert torch.compile(lambda h: head.predict(h, 0.04))(h) == found
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"sharded heads .* run eagerly"):
        torch.compile(head, fullgraph=True)(h, sets)


def _check_distributed_tensors(h, sets):
    """Under FSDP2 every verb works; weights that nobody gathers are refused with the remedy."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for make in (lambda: sk.LinearHead(WIDTH, N), lambda: sk.DFTHead(WIDTH, N, K, S)):
        torch.manual_seed(5)
        head = make()
        want, top, found, matrix = head.loss(h, sets), head.topk(h, 3), head.predict(h), head.weight_matrix()
        fully_shard(head, mesh=mesh)
        with pytest.raises(TypeError, match=r"weight is a DTensor.*unshard\(\) of that module first"):
            head.weight_matrix()
        value = head.loss(h, sets)
        value.backward()
        torch.testing.assert_close(value, want)
        assert all(parameter.grad is not None for parameter in head.parameters())
        torch.testing.assert_close(head.topk(h, 3), top)
        assert head.predict(h) == found
        head.unshard()
        torch.testing.assert_close(head.weight_matrix(), matrix)
        head.reshard()
        model = fully_shard(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), make()), mesh=mesh)
        with pytest.raises(TypeError, match=r"weight is a DTensor.*inside the forward of the module"):
            model[1].loss(h, sets)
    fully_shard(bare := sk.DFTHead(WIDTH, N, K), mesh=mesh)(h, sets).backward()
    assert bare.proj.weight.grad is not None
    spread = distribute_tensor(torch.randn(N, WIDTH), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"^weight is a DTensor.*full_tensor"):
        sk.functional.linear_loss(h, spread, sets)
    with pytest.raises(TypeError, match=r"^z is a DTensor"):
        sk.functional.lml(spread, 2)
    with pytest.raises(TypeError, match=r"the weight of layer '0' is a DTensor"):
        sk.swap_output_layer(fully_shard(torch.nn.Sequential(torch.nn.Linear(WIDTH, N)), mesh=mesh), "0", K)


def _check_priors_under_fsdp():
    """Labels start at their prior in a head that FSDP2 has sharded: by init_prior, and when it was made without data."""
    from torch.distributed.fsdp import fully_shard

    mesh, frequencies = torch.distributed.init_device_mesh("cpu", (2,)), torch.linspace(0.01, 0.2, N)
    for make, prior in (
        (lambda **given: sk.DFTHead(WIDTH, N, K, S, **given), 2.0),
        (lambda **given: sk.DFTHead(WIDTH, N, K, S, bias=True, **given), frequencies),
        (lambda **given: sk.LinearHead(WIDTH, N, **given), frequencies),
    ):
        want = {name: p for name, p in make(prior=prior).named_parameters() if "bias" in name}
        late, made = make(), make(prior=prior, device="meta")
        for head in (late, made):
            fully_shard(head, mesh=mesh)
        late.init_prior(prior)
        made.to_empty(device="cpu").reset_parameters()
        for head in (late, made):
            for name, bias in want.items():
                torch.testing.assert_close(head.get_parameter(name).full_tensor(), bias)


def accumulators():
    propensity = sk.metrics.propensities(torch.arange(N), 1000)
    return [
        sk.metrics.RankingMetrics(N, (1, 5), propensity),
        sk.metrics.F1Metrics(N),
        sk.metrics.MeanAveragePrecision(N),
        sk.metrics.MeanAveragePrecision(N, bins=32),
        sk.metrics.ThresholdAveraging(N),
    ]


def update(metrics, rows):
    """Rows of one data set, some of whose labels are unknown; a rank may have none."""
    torch.manual_seed(8)
    values, top = torch.randn(12, N).sort(1, descending=True)
    predicted, sets, unknown = (random_sets(12, N, seed=seed) for seed in range(3))
    arguments = ((top,), (predicted,), (values, top), (values, top), (values, top))
    for metric, given in zip(metrics, arguments, strict=True):
        metric.update(*(part[rows] for part in given), sets[rows], unknown=unknown[rows])
    return metrics


def _check_metrics(rank):
    """What the ranks have seen together is what one process sees of all rows."""
    for rows in (slice(0, 5), slice(5, 12)), (slice(0, 12), slice(12, 12)):
        mine = update(accumulators(), rows[rank])
        if rank == 1:  # as a rank that computes in float64 has them
            mine[2]._pairs = [(labels, scores.double(), hits) for labels, scores, hits in mine[2]._pairs]
        before = [metric._sums["rows"].item() for metric in mine]
        for metric, whole in zip(mine, update(accumulators(), slice(0, 12)), strict=True):
            synced = metric.sync()
            assert synced.compute() == pytest.approx(whole.compute(), rel=1e-12)
            assert synced.sync().merge(synced)._sums["rows"] == 3 * synced._sums["rows"]  # 2 ranks and 1: a copy each
        assert [metric._sums["rows"].item() for metric in mine] == before
    with pytest.raises(ValueError, match="different kinds or settings: rank 0"):
        sk.metrics.MeanAveragePrecision(N, bins=2 + rank).sync()
    propensity = torch.full((N,), 0.5 + rank / 4)
    with pytest.raises(ValueError, match="different kinds or settings: rank 0"):
        sk.metrics.RankingMetrics(N, propensity=propensity).sync()
    alone = torch.distributed.new_group([0])
    if rank == 0:
        assert sk.metrics.F1Metrics(N).sync(alone).num_labels == N
    else:
        with pytest.raises(ValueError, match="not a member"):
            sk.metrics.F1Metrics(N).sync(alone)


def _worker(rank: int, folder) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        join(folder, rank)
        group = torch.distributed.group.WORLD
        head, h, sets = head_and_batch(process_group=group)
        out = results(head, h, sets)
        grad = head.slack_weight.grad.full_tensor()
        for norm_type in (1.0, 2.0, float("inf")):
            out |= clipped(head, h, sets, norm_type)
        fresh = sk.DFTHead(WIDTH, N, K, S, process_group=group, dtype=torch.float64)
        for state in (head.state_dict(), whole_state(head)):
            torch.nn.init.zeros_(fresh.slack_weight)
            fresh.load_state_dict(state)
            assert torch.equal(fresh.slack_weight.to_local(), head.slack_weight.to_local())
        for rows in (N - 1, N + 1, head.shard.rows):
            with pytest.raises(RuntimeError, match=f"slack_weight has {rows} rows for num_labels = {N}"):
                fresh.load_state_dict(head.state_dict() | {"slack_weight": torch.zeros(rows, S)})
        whole = sk.DFTHead(WIDTH, N, K, S, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"slack_weight is a DTensor.*full_state_dict=True"):
            whole.load_state_dict(head.state_dict())
        assert torch.equal(fresh.slack_weight.to_local(), head.slack_weight.to_local())
        _check_clipping(head, h, sets)
        _check_batches(head, h, sets, monkeypatch)
        monkeypatch.undo()
        _check_compiled(head, h, sets)
        _check_distributed_tensors(h.float(), sets)
        _check_priors_under_fsdp()
        _check_metrics(rank)
        torch.save((grad, out), folder / f"{rank}.pt")
        leave(folder, rank)


def test_two_ranks_equal_one(tmp_path):
    torch.multiprocessing.spawn(_worker, (tmp_path,), nprocs=2)
    head, h, sets = head_and_batch()
    want = results(head, h, sets)
    slack_grad = head.slack_weight.grad.clone()
    for norm_type in (1.0, 2.0, float("inf")):
        want |= clipped(head, h, sets, norm_type)
    for rank in range(2):
        grad, got = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        torch.testing.assert_close(grad, slack_grad)
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, msg=lambda m, k=key: f"{k}: {m}")
    head.load_state_dict({key[6:]: value for key, value in want.items() if key.startswith("state ")})


def test_clipping_without_shards_is_torchs():
    head, h, sets = head_and_batch()
    for clip in (torch.nn.utils.clip_grad_norm_, lambda p, m: sk.clip_grad_norm_(head, m)):
        head.zero_grad()
        head.loss(h, sets, reduction="sum").backward()
        norm = clip(head.parameters(), 0.5)
        if clip is torch.nn.utils.clip_grad_norm_:
            want = [norm, *(p.grad.clone() for p in head.parameters())]
    torch.testing.assert_close([norm, *(p.grad for p in head.parameters())], want)
    with pytest.raises(TypeError, match="give the model, not its parameters"):
        sk.clip_grad_norm_(head.parameters(), 1.0)
    with pytest.raises(ValueError, match=r"max_norm must be at least 0, got -1\.0"):
        sk.clip_grad_norm_(head, -1.0)
    with pytest.raises(ValueError, match=r"norm_type must be positive, got 0"):
        sk.clip_grad_norm_(head, 1.0, norm_type=0)
    assert sk.clip_grad_norm_(torch.nn.ReLU(), 1.0) == 0


def test_needs_torch_distributed():
    with pytest.raises(RuntimeError, match=r"process_group needs .*init_process_group first"):
        sk.DFTHead(WIDTH, N, K, S, process_group=object())
    with pytest.raises(RuntimeError, match=r"device_mesh needs .*init_process_group first"):
        sk.LinearHead(WIDTH, N, device_mesh=object())
    with pytest.raises(ValueError, match="both given"):
        sk.LinearHead(WIDTH, N, device_mesh=object(), process_group=object())
