"""The DFT in the columns that slack leaves of its padding, by the CUDA kernels on the host: see ``test_cuda_host.py``."""

from __future__ import annotations

import pytest
import torch

from sigkernels.backends import cuda, flash_pass
from sigkernels.losses import BCE, Focal

from .problems import Size, problem
from .test_cuda_host import DTYPES, agrees, fused, prepare, same_in_any_order, tf32  # noqa: F401  for pytest: two of them


def left_out(p) -> int:
    """So many columns of the basis are 0."""
    kind = cuda._kind(p.x.dtype)
    labels = flash_pass.block_labels(p.layer.num_rows, cuda._sizes(kind, len(p.x), p.layer.weight.shape[1], 0))
    return flash_pass.blank_columns(p.layer.num_labels, p.layer.k, labels, p.x.dtype)


# Rows, labels, frequencies: x in registers or in shared memory, the coefficients made by the kernel or by a product, tiles
# that are not whole, groups of rows.
PROBLEMS = {
    "few rows": Size(33, 700, 4, 0),
    "bias": Size(64, 700, 2, 0, bias=True),
    "many rows": Size(200, 700, 4, 0, bias=True),
    "rows in groups": Size(270, 300, 2, 0),
    "label range": Size(5, 4000, 8, 0, start=130, rows=200),
    "k=0": Size(9, 300, 0, 0, bias=True),
}
DEVICES = {"sm_90": 227, "sm_89": 99}  # KB of shared memory that a block may have


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_slack_at_the_edge(cuda_on_host, monkeypatch, dtype, name, columns, device):
    """The widest slack that leaves enough columns, one more, which needs 16 of its own, and odd ones."""
    monkeypatch.setenv("SHIM_SHARED", str(DEVICES[device] * 1024))
    cuda._sizes.cache_clear()
    size = PROBLEMS[name]._replace(s=columns)
    fits = columns - 16 + left_out(problem(size, dtype)) // 4 * 4
    assert columns - 16 < fits < columns
    for slack in (fits, fits + 1, fits - 1, columns - 17):
        p = problem(size._replace(s=slack), dtype)
        agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
    cuda._sizes.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_columns_that_are_left_out_are_not_read(cuda_on_host, monkeypatch, dtype):
    """Which shows that the others lie where slack leaves room: of columns of their own every number is read."""
    p = problem(Size(70, 300, 2, 51), dtype)
    tables, blank = flash_pass.block_tables, left_out(p)
    assert blank >= 4

    def poisoned(*args):
        made = tables(*args)
        basis = made.basis.clone()
        basis[:, :4] = float("nan")
        return made._replace(basis=basis)

    monkeypatch.setattr(flash_pass, "block_tables", poisoned)
    agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
    wider = problem(Size(70, 300, 2, 64), dtype)
    assert fused(cuda_on_host, wider, BCE()).rows.isnan().all()


def test_thread_order_does_not_matter(cuda_on_host, monkeypatch):
    for kind, loss, rows in ((torch.bfloat16, BCE(), 40), (torch.float32, Focal(), 40), (torch.float32, BCE(), 140)):
        same_in_any_order(cuda_on_host, monkeypatch, problem(Size(rows, 300, 2, 51, bias=True), kind), loss)


def test_parts_of_the_gradients(cuda_on_host):
    """Gradients that are not wanted change nothing of the others."""
    p = problem(Size(5, 130, 2, 51, bias=True), torch.bfloat16)
    full = fused(cuda_on_host, p, BCE())
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        part = fused(cuda_on_host, p, BCE(), needs=needs)
        assert torch.equal(part.rows, full.rows)
        for needed, got, want in zip(needs, part.gradients, full.gradients, strict=True):
            assert (got is not None) == needed and (not needed or torch.equal(got, want))


@pytest.mark.parametrize("rows", [7, 131])
@pytest.mark.parametrize(
    ("size", "numbers"), [(Size(0, 700, 2, 21), 8), (Size(0, 700, 6, 21), 16), (Size(0, 9000, 40, 50, rows=300), 8)]
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_waves_of_a_row_or_of_two(cuda_on_host, monkeypatch, dtype, size, numbers, rows):
    """Few waves: the last kernel has two rows in a product, of which the last may be missing."""
    tables, seen = flash_pass.block_tables, []
    monkeypatch.setattr(flash_pass, "block_tables", lambda *args: seen.append(tables(*args)) or seen[-1])
    p = problem(size._replace(batch=rows), dtype)
    agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
    assert seen[0].turns.factors.shape[2] == numbers
