"""Gradients times the upstream gradient of a scalar loss: one launch, which reads one number and ends where it is 1."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .pointwise import on

BLOCK = 1024
_PROGRAMS = 4096  # at the most: they walk over the arrays


@triton.jit
def scale_array(a, size, number, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(a + at, mask=at < size, other=0.0)
        tl.store(a + at, (value.to(number.dtype) * number).to(value.dtype), mask=at < size)


@triton.jit(do_not_specialize=["size_a", "size_b", "size_c"])
def scale_kernel(
    a, b, c,  # three arrays of one dtype
    factor,  # []
    size_a, size_b, size_c,
    BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.load(factor)
    if number.dtype != tl.float64:
        number = number.to(tl.float32)
    if number != 1.0:
        scale_array(a, size_a, number, BLOCK)
        scale_array(b, size_b, number, BLOCK)
        scale_array(c, size_c, number, BLOCK)


def scale_(grads: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Multiplies contiguous arrays of one dtype, at most three, by ``factor []``; those that it does not take are left."""
    taken = [g for g in grads if g.dtype == grads[0].dtype and g.is_contiguous() and g.numel()][:3]
    if taken:
        sizes = [grad.numel() for grad in taken]
        spare = 3 - len(taken)
        programs = min(triton.cdiv(max(sizes), BLOCK), _PROGRAMS)
        with on(factor):
            scale_kernel[(programs,)](*taken, *taken[:1] * spare, factor, *sizes, *[0] * spare, BLOCK=BLOCK)
    return [grad for grad in grads if not any(grad is done for done in taken)]
