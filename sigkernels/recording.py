"""Whether torch.jit.trace or torch.onnx.export record a head, which know torch's own operators only."""

from __future__ import annotations

import torch

RECORDED = (
    "torch.jit.trace and torch.onnx.export record the logits head(h) of a head that is not sharded, nothing else; take the "
    "loss, topk or predict from the logits, or use torch.export, which keeps them whole"
)


def is_recorded() -> bool:
    """Whether one of them watches."""
    return torch.jit.is_tracing() or (torch.compiler.is_exporting() and _is_for_onnx())


def _is_for_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


# What torch.compiler.assume_constant_result sets, without its import of the compiler, which takes seconds: dynamo takes the
# answer to be False, and torch.onnx.export tries it after another way.
_is_for_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]
