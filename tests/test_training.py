"""The ways people train: autocast, scaling, accumulation, checkpointing, and learning at all."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import random_sets
from torch import nn

import sigkernels as sk


def head_and_batch(batch=8, **kw):
    return sk.DFTHead(24, 60, k=4, slack=5, **kw), torch.randn(batch, 24), random_sets(batch, 60)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, dtype):
    head, h, sets = head_and_batch()
    head, h, sets = head.to(device), h.to(device), sets.to(device)
    want = head.loss(h, sets)
    with torch.autocast(device.type, dtype=dtype):
        loss = head.loss(h, sets)
        assert head(h).dtype == dtype
        assert head.topk(h, 2)[0].dtype == dtype
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=2e-2, atol=1e-3)
    loss.backward()
    assert head.slack_weight.grad.dtype == torch.float32 and head.slack_weight.grad.abs().max() > 0


def test_float16_gradients_do_not_underflow(device):
    head = sk.DFTHead(24, 4000, k=4, slack=5, dtype=torch.float16, device=device)
    h, sets = torch.randn(8, 24, device=device).half(), random_sets(8, 4000).to(device)
    (head.loss(h, sets) * 2.0**15).backward()
    exact = copy.deepcopy(head).double()
    exact.zero_grad()
    (exact.loss(h.double(), sets) * 2.0**15).backward()
    error = (head.slack_weight.grad.double() - exact.slack_weight.grad).norm() / exact.slack_weight.grad.norm()
    assert error < 5e-3


def test_gradient_accumulation(device):
    head, h, sets = head_and_batch()
    head, h, sets = head.to(device), h.to(device), sets.to(device)
    head.loss(h, sets, reduction="sum").backward()
    want = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    for rows in (slice(0, 3), slice(3, 8)):
        head.loss(h[rows], sets[rows], reduction="sum").backward()
    for grad, p in zip(want, head.parameters(), strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    head, h, sets = head_and_batch()
    h.requires_grad_()
    head.loss(h, sets).backward()
    want = [h.grad.clone(), *(p.grad.clone() for p in head.parameters())]
    head.zero_grad()
    h.grad = None
    torch.utils.checkpoint.checkpoint(head.loss, h, sets, use_reentrant=reentrant).backward()
    for grad, leaf in zip(want, [h, *head.parameters()], strict=True):
        torch.testing.assert_close(leaf.grad, grad)


def test_a_head_learns(device):
    head = sk.DFTHead(32, 100, k=3, slack=8).to(device)
    features, sets = torch.randn(32, 32, device=device), random_sets(32, 100, most=3).to(device)
    encoder = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).to(device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 0.02)
    first = None
    for _ in range(80):
        optimizer.zero_grad()
        loss = head.loss(encoder(features), sets, reduction="sum") / 32
        loss.backward()
        optimizer.step()
        first = first or loss.item()
    assert loss.item() < first / 5
