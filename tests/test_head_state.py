"""The state of a DFTHead carries its k and codes through every format, and another head refuses it."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import join, leave
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import sigkernels as sk
from sigkernels.fixed_columns import MARK, FixedColumns

REFUSED = r"DFTHead with k = 10, not 2 and codes = 0, not 16; build one like it"


def saved_head(**mesh) -> sk.DFTHead:
    torch.manual_seed(0)
    return sk.DFTHead(24, 60, k=10, slack=2, **mesh)


def other_head(**mesh) -> sk.DFTHead:
    """Another matrix of parameters that have the same names and shapes."""
    torch.manual_seed(1)
    return sk.DFTHead(24, 60, k=2, codes=16, slack=2, **mesh)


def by_torch(state, folder):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def by_safetensors(state, folder):
    module = pytest.importorskip("safetensors.torch")
    module.save_file(state, folder / "state.safetensors")
    return module.load_file(folder / "state.safetensors")


def by_distributed_checkpoint(state, folder):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    return into


FORMATS = [lambda state, folder: dict(state), by_torch, by_safetensors, by_distributed_checkpoint]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("format_", FORMATS, ids=["dict", "torch", "safetensors", "dcp"])
def test_a_state_of_another_k_is_refused_and_nothing_changed(format_, strict, tmp_path):
    state = format_(saved_head().state_dict(), tmp_path)
    other = other_head()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(RuntimeError, match=REFUSED):
        other.load_state_dict(state, strict=strict)
    with pytest.raises(RuntimeError, match=rf"1\. is of a {REFUSED}"):
        nn.Sequential(nn.Identity(), other).load_state_dict({f"1.{k}": v for k, v in state.items()}, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    same = sk.DFTHead(24, 60, k=10, slack=2)
    assert not any(same.load_state_dict(state, strict=strict))
    assert torch.equal(same.slack_weight, saved_head().slack_weight)


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_without_the_mark_is_accepted(strict):
    state = saved_head().state_dict()
    del state[MARK]
    head = sk.DFTHead(24, 60, k=10, slack=2)
    assert not any(head.load_state_dict(state, strict=strict))  # nothing is missing, nothing unexpected
    assert torch.equal(head.slack_weight, state["slack_weight"])
    with pytest.raises(RuntimeError, match="slack_weight"):
        head.load_state_dict({"proj.weight": state["proj.weight"]})


def test_a_mark_that_was_cast_is_no_mark():
    """``{name: value.half() …}``: a float16 cannot hold it, so that nothing can be said."""
    other_head().load_state_dict({name: value.half() for name, value in saved_head().state_dict().items()})


def test_the_mark():
    for k, codes in ((0, 0), (10, 16), (2_000_000, 4096)):
        assert FixedColumns.of_mark(FixedColumns(k, codes).mark) == (k, codes)
    assert FixedColumns.of_mark(torch.tensor(10, device="meta")) is None
    with torch.device("meta"):
        assert FixedColumns.of_mark(FixedColumns(2, 16).mark) == (2, 16)
        assert FixedColumns.of_mark(FixedColumns(2, 16).mark.numpy()) == (2, 16)
    head = saved_head()
    assert not list(head.buffers())  # DDP sends all buffers before each forward
    assert head.state_dict()[MARK].shape == () and "num_labels=60" in repr(head)


def test_heads_on_the_meta_device(tmp_path):
    with torch.device("meta"):
        head, other = saved_head(), other_head()
    head.load_state_dict(saved_head().state_dict(), assign=True)
    assert torch.equal(head.slack_weight, saved_head().slack_weight)
    with pytest.raises(RuntimeError, match=REFUSED):
        other.load_state_dict(saved_head().state_dict(), assign=True)


def _worker(rank: int, folder) -> None:
    join(folder, rank, 2)
    group = torch.distributed.group.WORLD
    whole = StateDictOptions(full_state_dict=True)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states = {}
    for name, wrap in (("sharded", nn.Sequential), ("fsdp", lambda head: fully_shard(nn.Sequential(head)))):
        mesh = {"process_group": group} if name == "sharded" else {}
        model, other = wrap(saved_head(**mesh)), wrap(other_head(**mesh))
        with pytest.raises(RuntimeError, match=REFUSED):
            other.load_state_dict(model.state_dict())
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / name)
        into = {"model": get_model_state_dict(other)}
        dcp.load(into, checkpoint_id=folder / name)
        with pytest.raises(RuntimeError, match=REFUSED):
            set_model_state_dict(other, into["model"])
        states[name] = get_model_state_dict(model, options=whole)
        unmarked = {key: value for key, value in states[name].items() if not key.endswith(MARK)}
        for options in (whole, from_first):
            given = states[name] if rank == 0 or options is whole else {}
            with pytest.raises(RuntimeError, match=REFUSED):
                set_model_state_dict(other, dict(given), options=options)
            set_model_state_dict(model, dict(given), options=options)
            set_model_state_dict(model, dict(unmarked) if given else {}, options=options)
        again = get_model_state_dict(model, options=whole)
        assert all(torch.equal(again[key], value) for key, value in states[name].items())
    assert all(torch.equal(states["fsdp"][key], value) for key, value in states["sharded"].items())
    leave(folder, rank, 2)


def test_two_ranks(tmp_path):
    torch.multiprocessing.spawn(_worker, (tmp_path,), nprocs=2)
