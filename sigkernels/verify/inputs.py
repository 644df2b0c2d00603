"""Heads and matrices in every form that ``verify`` accepts, checked once, and the question that they pose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy import ndarray

from ..codes import check_codes
from ..dft import check_dft
from ..dft_head import DFTHead
from ..head_base import Head
from ..validation import check_number, is_distributed
from .estimators import CLASSIFIER, layer_of
from .input_ball import BALLS
from .question import Question
from .rules import DecisionRule

DOMAINS = ("all", "nonnegative")


def _plain(name: str, value: torch.Tensor) -> ndarray:
    """The numbers of a tensor; one that has none of its own is refused with the remedy."""
    if is_distributed(value):
        raise TypeError(
            f"{name} is a {type(value).__name__}, sharded over processes: gather it on every rank with full_tensor() "
            "(of a whole model: torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "StateDictOptions(full_state_dict=True)) and verify that"
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be dense, got layout {value.layout}; call .to_dense()")
    if value.device.type == "meta":
        raise TypeError(f"{name} is on the meta device and holds no numbers; load the weights first")
    if "float8" in str(value.dtype) or value.is_quantized:
        raise TypeError(
            f"{name} is {value.dtype}, whose numbers mean nothing without their scales; dequantize it first"
        )
    value = value.cpu()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()


def as_numpy(name: str, value: Any) -> ndarray:
    """A tensor or array as numpy, in a dtype that holds every stored number exactly."""
    if isinstance(value, torch.Tensor):
        value = _plain(name, value.detach())
    elif isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError:
            raise ValueError(f"{name} must have rows of one length, and its lists have different ones") from None
    if not isinstance(value, np.ndarray):
        forms = "a head, a torch tensor or a numpy array" if name == CLASSIFIER else "a torch tensor or a numpy array"
        raise TypeError(f"{name} must be {forms}, got {type(value).__name__}{_remedy(value)}")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError(f"{name} is a masked array, and what it masks would count: fill it first")
    value = np.asarray(value)
    if value.dtype.kind not in "fiu" or value.dtype.itemsize > 8:
        raise TypeError(f"{name} must hold real numbers of at most 64 bits, got dtype {value.dtype}")
    if value.dtype.kind in "iu":
        if value.size and max(abs(int(value.max())), abs(int(value.min()))) > 2**53:
            raise ValueError(f"{name} holds integers beyond 2^53, which float64 cannot represent")
        value = value.astype(np.float64)
    if value.dtype == np.float16:
        value = value.astype(np.float32)
    if not np.all(np.isfinite(value)):
        where = tuple(int(v) for v in np.argwhere(~np.isfinite(value))[0])
        raise ValueError(f"{name} holds {value[where]} at {list(where)}; every entry must be finite")
    return value


def _remedy(value: Any) -> str:
    """How to get the matrix of something that is none."""
    if isinstance(value, torch.nn.Module):
        matrix = getattr(getattr(value, "weight", None), "ndim", 0) == 2
        return "; give its weight" if matrix else "; give its output layer, such as model[-1]"
    if isinstance(value, Mapping):
        return "; give one of its entries"
    method = next((m for m in ("toarray", "to_numpy") if hasattr(value, m)), "")
    return f"; call .{method}()" if method else ""


def as_question(
    classifier: Any,
    bias: Any,
    tol: float,
    box: float | None,
    rule: DecisionRule,
    domain: str = "all",
    ball: str = "box",
) -> tuple[Question, list[str]]:
    """The question that a head, an ``nn.Linear`` or a matrix poses, and notes about how it was read."""
    notes = []
    k, codes = -1, 0
    classifier, bias = layer_of(classifier, bias)
    if isinstance(classifier, (Head, torch.nn.Linear)):
        own = getattr(classifier, "bias", None)
        own = None if own is None else _label_weights(classifier, "bias")
        if own is not None and bias is not None:
            raise ValueError("bias was given, but the classifier has a bias of its own: leave bias=None")
        bias = own if bias is None else bias
    if isinstance(classifier, DFTHead):
        k, codes = classifier.k, classifier.codes
        weight = as_numpy("slack_weight", _label_weights(classifier, "slack_weight"))
        notes.append(
            f"the DFT part (k = {k}) is the exact matrix, evaluated in float64 with its rounding bounded; "
            "rounded to float32 it would lose the guarantee"
        )
    elif isinstance(classifier, (Head, torch.nn.Linear)):
        weight = as_numpy("weight", _label_weights(classifier, "weight"))
    else:
        weight = as_numpy(CLASSIFIER, classifier)
    question = checked_question(weight, bias, k, tol, box, rule, codes, domain, ball)
    if isinstance(classifier, Head) and classifier.proj is not None and classifier.in_features < question.inputs:
        notes.append(
            f"the verdicts are about the output layer: its projection from {classifier.in_features} to {question.inputs} "
            "features cannot reach every x"
        )
    if weight.dtype == np.float32 and k < 0:
        notes.append("the float32 weights are taken as the exact numbers they store")
    if rule.is_free and k >= 0:
        notes.append("a free threshold adds nothing to a DFT head: its first column is constant")
    elif np.any(rule.logit()):
        notes.append("the threshold's logit is part of the bias, rounded to float64")
    if domain != "all":
        notes.append(f"only inputs without negative entries count; in proofs label {question.labels} + j is x_j > 0")
    return question, notes


def _label_weights(layer: Any, name: str) -> torch.Tensor:
    """A layer's own weights; those of a head whose labels are sharded are gathered, on every rank."""
    if not isinstance(layer, Head) or (layer.shard is None and is_distributed(getattr(layer, name))):
        return getattr(layer, name)
    return layer.all_rows(name)


def checked_question(
    weight: Any,
    bias: Any,
    k: int,
    tol: float,
    box: float | None,
    rule: DecisionRule,
    codes: int = 0,
    domain: str = "all",
    ball: str = "box",
) -> Question:
    """The question of a matrix W, or of the slack columns of a DFT (``k ≥ 0``), after every check of its numbers."""
    if ball not in BALLS:
        raise ValueError(f"ball={ball!r}: use one of {', '.join(map(repr, BALLS))}")
    tol, box = check_number("tol", tol), check_number("box", BALLS[ball].default_size if box is None else box)
    if tol < 0:
        raise ValueError(f"tol must be at least 0, got {tol}")
    if not box > 0:
        raise ValueError(f"box must be positive, got {box}")
    if not 1e-100 <= box <= 1e100:
        raise ValueError(f"box must lie between 1e-100 and 1e100, got {box}")
    weight = as_numpy(CLASSIFIER, weight)
    if weight.ndim != 2 or weight.shape[0] < 1 or (k < 0 and weight.shape[1] < 1):
        raise ValueError(f"{CLASSIFIER} must be a matrix W [labels, features], got shape {weight.shape}")
    if k != -1:
        check_dft(weight.shape[0], k)
    if check_codes(codes, weight.shape[0]) and k < 0:
        raise ValueError(f"codes = {codes} stand beside a DFT part, and k = {k} says that there is none")
    if bias is not None:
        bias = as_numpy("bias", bias)
        if bias.shape != (weight.shape[0],):
            raise ValueError(f"bias must have shape ({weight.shape[0]},) like the labels of W, got {bias.shape}")
        if not np.any(bias):
            bias = None
    rule.check_shape(weight.shape[0])
    if domain not in DOMAINS:
        raise ValueError(f"domain={domain!r}: use one of {', '.join(map(repr, DOMAINS))}")
    if domain != "all" and k >= 0:
        raise ValueError(
            f"domain={domain!r} is about features after a ReLU, and those of a DFT head are the output of its projection: "
            'use domain="all", or verify a plain matrix'
        )
    return Question(weight, bias, k, tol, box, rule, codes, domain, ball)
