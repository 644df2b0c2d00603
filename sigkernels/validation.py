"""The checks of arguments: each is checked once and brought into one form; code below the public functions trusts it.

An error names the argument, the value and the remedy.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from .layer import Layer, LayerMeta
from .operator_dispatch import by_operator

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CODES = (0, 16, 64, 256, 1024, 4096)
REDUCTIONS = ("mean", "sum", "none")
MAX_LABELS = 2**40  # beyond it, positions row·num_labels + label would overflow for batches that fit into memory
_autocast = torch._C._is_any_autocast_enabled
_PLAIN = (Tensor, Parameter)  # the types of tensors whose numbers nobody else looks after


def check_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """``value`` as an int: Python's and numpy's integers and integer tensors of one entry pass, bools do not."""
    if type(value) is not int:  # the usual case first: torch.compile follows it
        value = _index(name, value)
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return value


def check_num_labels(num_labels: Any) -> int:
    """``num_labels`` as an int in 1 … 2^40."""
    return check_int("num_labels", num_labels, 1, MAX_LABELS)


def check_width(name: str, width: Any, least: int) -> int:
    """A number of features or columns as an int."""
    return check_int(name, width, least, MAX_LABELS)


def _index(name: str, value: Any) -> int:
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        if not is_bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be a whole number, got {value!r}")


def check_number(name: str, value: Any, remedy: str = "") -> float:
    """``value`` as a finite number; numpy's and tensors ``[]`` pass, bools, strings, None and other tensors do not."""
    remedy = f"; {remedy}" if remedy else ""
    if type(value) is not float and type(value) is not int:
        if isinstance(value, Tensor) and value.ndim == 0 and not value.requires_grad and not value.is_complex():
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {value!r}{remedy}")
    try:
        value = value if type(value) is int else float(value)
        finite = math.isfinite(value)
    except OverflowError:  # of a whole number, which may be too long to be printed
        raise ValueError(f"{name} must be within the range of float64{remedy}") from None
    if not finite:
        raise ValueError(f"{name} must be finite, got {value}{remedy}")
    return value


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_tau(tau: float) -> float:
    """Checks that the temperature is not below what float64 can tell from 0, and returns it."""
    tau = float(check_number("tau", tau))
    if tau < 1e-6:
        raise ValueError(f"tau must be at least 1e-6, got {tau}; the published value is 1.0")
    return tau


def check_memory(name: str, tensor: Tensor) -> None:
    """Refuses tensors whose numbers do not lie in one dense array of this process."""
    if tensor.layout is not torch.strided:
        call = f"call {name}.to_dense()" if name.isidentifier() else "convert it with .to_dense()"
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}; {call}")
    if type(tensor) not in _PLAIN and is_distributed(tensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, sharded over processes, and the kernels read plain memory. Under FSDP2 "
            "call the head inside the forward of the module that fully_shard wraps, which gathers its parameters, or call "
            "unshard() of that module first; else pass full_tensor() or to_local(). "
            "DFTHead(…, device_mesh=…) shards labels over processes by itself"
        )


def refuse_meta(name: str, tensor: Tensor) -> None:
    """Refuses a tensor without numbers where its numbers are needed."""
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no numbers; load or make them on a real device first")


def is_distributed(tensor: Any) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "to_local")  # DTensor, without importing it


def check_device(device: Any) -> torch.device:
    """A device that can be computed on here."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f'device={device!r} cannot be used here ({reason}); "cpu" always can') from None
    if found.type == "meta":
        raise ValueError(f'device={device!r} holds no numbers; use "cpu" or an accelerator')
    return found


def check_dtype(dtype: Any) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype must be torch.float16, bfloat16, float32 or float64, or None, got {dtype!r}")


def check_reduction(reduction: str) -> str:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    return reduction


def check_loss(loss: Any, num_labels: int, device: torch.device) -> None:
    if not isinstance(loss, losses.Loss):
        hint = ""
        if isinstance(loss, type) and issubclass(loss, losses.Loss):
            hint = f"; did you mean {loss.__name__}()?"
        elif isinstance(loss, str) and loss in REDUCTIONS:
            hint = f"; did you mean reduction={loss!r}?"
        raise TypeError(f"loss must be a sigkernels loss such as BCE(), got {loss!r}{hint}")
    missing = loss.incomplete()
    if missing is not None:
        raise TypeError(missing)
    loss.check_labels(num_labels, device)


def check_m(m: int, num_labels: int) -> int:
    m = check_int("m", m)
    if not 1 <= m <= num_labels:
        raise ValueError(f"m must lie in 1 … num_labels = {num_labels}, got {m}")
    return m


def check_dft(num_labels: int, k: int) -> tuple[int, int]:
    """Refuses an (n, k) for which a column of the DFT would vanish or repeat; returns both as plain ints."""
    num_labels, k = check_num_labels(num_labels), check_int("k", k, 0)
    if 2 * k + 1 > num_labels:
        raise ValueError(
            f"k = {k} needs 2k+1 = {2 * k + 1} ≤ num_labels = {num_labels}: above that a DFT column vanishes or "
            f"repeats. Use k ≤ {(num_labels - 1) // 2}; with so few labels a full nn.Linear costs no more."
        )
    return num_labels, k


def check_codes(codes: int, num_labels: int) -> int:
    """Refuses a number of code columns for which there is no code; returns it as a plain int (0: no codes)."""
    codes = check_int("codes", codes, 0)
    if codes not in CODES:
        raise ValueError(
            f"codes must be one of {', '.join(map(str, CODES))}, got {codes}; "
            f"for {num_labels} labels use codes={smallest_codes(num_labels)}"
        )
    return codes


def smallest_codes(num_labels: int) -> int:
    """The fewest columns whose bound on the inner products holds for all labels (4096 if none does)."""
    return next((c for c in CODES[1:] if num_labels <= c * c // 2), CODES[-1])


def check_dft_layer(
    x: Tensor, slack_weight: Tensor, num_labels: int, k: int, bias: Tensor | None = None, codes: int = 0
) -> tuple[Tensor, Layer]:
    """Checks the arguments of a DFT operation; returns x as ``[B, D]`` and the layer, both in one dtype."""
    # Every step comes by: what is right takes one comparison here, and the checks that explain see the rest.
    if not (type(num_labels) is type(k) is type(codes) is int and 0 <= 2 * k < num_labels and codes in CODES):
        num_labels, k = check_dft(num_labels, k)
        codes = check_codes(codes, num_labels)
    _check_matrix("slack_weight", slack_weight)
    if slack_weight.shape[0] != num_labels:
        raise ValueError(
            f"slack_weight must have shape [num_labels, s] = [{num_labels}, s], got {tuple(slack_weight.shape)}"
        )
    if bias is not None:
        _check_bias(bias, num_labels)
    return check_input(x, Layer(slack_weight, bias, LayerMeta(num_labels, k, codes=codes)), "slack_weight")


def check_linear_layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Layer]:
    """Checks the arguments of a linear operation; returns x as ``[B, d]`` and the layer, both in one dtype."""
    _check_matrix("weight", weight)
    if weight.shape[0] < 1:
        raise ValueError(f"weight must have at least one row (label), got shape {tuple(weight.shape)}")
    if bias is not None:
        _check_bias(bias, weight.shape[0])
    return check_input(x, Layer(weight, bias, LayerMeta(weight.shape[0], -1)), "weight")


def _check_bias(bias: Any, num_labels: int) -> None:
    if not isinstance(bias, Tensor):
        hint = "; did you mean loss=…?" if isinstance(bias, losses.Loss) else ""
        raise TypeError(f"bias must be a tensor or None, got {type(bias).__name__}{hint}")
    if bias.shape != (num_labels,):
        raise ValueError(f"bias must have shape [{num_labels}], got {tuple(bias.shape)}")


def _check_matrix(name: str, weight: Any) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(weight).__name__}")
    if weight.ndim != 2:
        raise ValueError(f"{name} must be two-dimensional, got shape {tuple(weight.shape)}")


def check_input(x: Any, layer: Layer, weight_name: str) -> tuple[Tensor, Layer]:
    """Checks x against a layer; returns x as ``[B, D]`` and the layer, both in the dtype that autocast asks for."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    weight, bias, meta = layer
    device, width = x.device, meta.fixed_columns + weight.shape[1]
    if x.ndim < 1 or x.shape[-1] != width:
        parts = str(width)
        if layer.codes:
            parts = f"2k+1+codes+s = {layer.dft_columns} + {layer.codes} + {layer.weight.shape[1]} = {width}"
        elif layer.k >= 0:
            parts = f"2k+1+s = {layer.dft_columns} + {layer.weight.shape[1]} = {width}"
        raise ValueError(f"the last dimension of x must be {parts}, got shape {tuple(x.shape)}")
    _check_numbers("x", x, device)
    _check_numbers(weight_name, weight, device)
    if bias is not None:
        _check_numbers("bias", bias, device)
    rows = x
    # By conj().imag, for one: the numbers in memory are those of the other sign. Operators resolve it by themselves.
    if not torch.compiler.is_compiling() and (x.is_neg() or weight.is_neg() or (bias is not None and bias.is_neg())):
        rows, weight, bias = x.resolve_neg(), weight.resolve_neg(), None if bias is None else bias.resolve_neg()
        layer = layer._replace(weight=weight, bias=bias)
    if _autocast() and device.type != "meta" and torch.is_autocast_enabled(device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        layer = layer._replace(weight=weight, bias=bias)
    if weight.dtype != rows.dtype or (bias is not None and bias.dtype != rows.dtype):
        have = f"x {rows.dtype}, {weight_name} {weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}")
        raise TypeError(f"all inputs must have one dtype, got {have}; convert with .to(dtype) or use torch.autocast")
    if x.ndim != 2:
        rows = rows.unsqueeze(0).flatten(0, -2)  # keeps the batch size symbolic under torch.export
    return rows, layer


def _check_numbers(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
        check_memory(name, tensor)
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and x on {device}; move both to one device")


def check_targets(
    targets: Any, leading: torch.Size, num_labels: int, device: torch.device
) -> labels.LabelSets | Tensor:
    """``targets`` in any accepted form → LabelSets, or a dense tensor ``[B, n]`` in [0, 1], on a CPU floating point."""
    if isinstance(targets, np.ndarray) and targets.dtype != object:  # an array of objects holds lists
        targets = labels.forms.tensor_of("targets", targets).to(device)
    if isinstance(targets, Tensor) and targets.layout == torch.strided and not targets.is_nested:
        return _dense(targets, leading, num_labels, device)
    if isinstance(targets, labels.LabelSets) and targets.num_labels == num_labels:  # the usual case first
        sets = targets
    else:
        sets = labels.LabelSets.of(targets, num_labels, name="targets")
        if sets is not targets and not isinstance(targets, Tensor):  # it came from Python or numpy
            sets = sets.to(device)
    _, offsets = sets.checked()
    batch = math.prod(leading)
    if offsets.shape[0] - 1 != batch:
        raise ValueError(f"targets hold {len(sets)} label sets for {batch} rows of input; give one per row")
    if offsets.device != device:
        raise ValueError(f"targets are on {sets.device} and the input on {device}; use targets.to('{device}')")
    return sets


def _dense(targets: Tensor, leading: torch.Size, num_labels: int, device: torch.device) -> labels.LabelSets | Tensor:
    if targets.shape != (*leading, num_labels):
        raise ValueError(
            f"dense targets must have shape {[*leading, num_labels]}, got {list(targets.shape)}; "
            "for arrays of label numbers use LabelSets.from_lists"
        )
    if targets.device != device:
        raise ValueError(f"targets are on {targets.device} and the input on {device}; use targets.to('{device}')")
    check_memory("targets", targets)
    if targets.is_complex() or (targets.is_floating_point() and targets.dtype not in DTYPES):
        raise TypeError(
            f"dense targets must be bool, integer or floating point of 16 to 64 bits, got {targets.dtype}; convert them, "
            "such as with targets.float()"
        )
    if targets.requires_grad and torch.is_grad_enabled():
        raise ValueError("targets require a gradient, which the fused loss does not give; pass targets.detach()")
    dense = targets.detach().reshape(math.prod(leading), num_labels)  # numel() would be no symbol under torch.export
    # On an accelerator a look at the values would make the host wait for the device at every step.
    if device.type != "cpu":
        return dense
    if by_operator(dense) or torch._C._are_functorch_transforms_active():  # there are no values to look at
        return dense if dense.is_floating_point() else dense.to(torch.float32)
    if not dense.is_floating_point():
        return labels.LabelSets.of(dense, num_labels, name="targets")
    dense = dense.resolve_neg()
    if dense.numel():
        low, high = (bound.item() for bound in torch.aminmax(dense))
        if math.isnan(low):
            raise ValueError(
                "dense targets must lie in [0, 1], got NaN; where it marks labels that nobody has annotated, pass "
                "unknown=targets.isnan() as well"
            )
        if not (low >= 0 and high <= 1):
            raise ValueError(f"dense targets must lie in [0, 1], got values from {low} to {high}")
    return dense


from . import labels, losses  # noqa: E402 (last, because they import the checks above)
